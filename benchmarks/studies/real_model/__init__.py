"""Accuracy on pretrained language models that Python packages carry: fetched, converted, measured."""

"""The text that `kv_scales: calibrated` runs: written for it, and in the public domain."""

from __future__ import annotations

TEXT = """The harbour wakes before the town does. At four in the morning the ice machine starts, and by \
half past there are lights in every boat. Marta counts crates: forty of herring, twelve of cod, and a box \
that nobody ordered. "Leave it," says her brother, "somebody will ask." Nobody asks.

Question: A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 8. Both are open. \
When is it full? Answer: The first brings 240 / 6 = 40 litres an hour, the second takes 240 / 8 = 30, so \
10 are left, and 240 / 10 = 24 hours. Check: 24 * 40 - 24 * 30 = 960 - 720 = 240.

def longest_run(values):
    best = length = 0
    for before, after in zip(values, values[1:]):
        length = length + 1 if after > before else 0
        best = max(best, length)
    return best + 1 if values else 0

{"id": 7041, "name": "Ostrava", "open": true, "rates": [0.125, -3.5e-4, 1e6], "note": null}

Let f(x) = x^2 - 5x + 6. Then f(x) = (x - 2)(x - 3), so its zeros are x = 2 and x = 3, and as f is a \
parabola that opens upwards its least value lies between them, at x = 5/2, where f(5/2) = -1/4.

Wer früh aufsteht, sieht den Nebel über dem Fluss. Quand il pleut, la route sent la terre. El tren de las \
nueve llega tarde. 今日は風が強い。 Сегодня идёт снег. مرحبا. 12:45, 3/4, $19.99, 50 %, #42, a@b.example

First, write down what is known. Second, say what is asked. Third, look for the step between the two; if \
there is none, cut the question in half and begin again. Wait, that is not yet right: the second half may \
need the first. So number them, and answer them in order. Therefore the result is 128.
"""

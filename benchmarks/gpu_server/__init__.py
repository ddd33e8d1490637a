"""The parts of `bench_gpu_server.py`."""

"""Loggers in another process: calls return at once, and a logger process makes them (`rearview.background`).

The program calls a proxy of the logger (`logger_proxy`). `call_channel` encodes each call (`call_arguments`) and
copies it into shared memory (`shared_memory_ring`). `logger_process` constructs the logger
(`logger_factories`) and makes the calls on it. Messages to users call the logger a background writer, and its process
the writer process.
"""

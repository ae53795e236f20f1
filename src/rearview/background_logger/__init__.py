"""Loggers in another process: calls return at once, and the logger process makes them (`rearview.background`).

`logger_proxy` is the object that the program calls. `call_channel` encodes each call (`call_arguments`) and
copies it into shared memory (`shared_memory_ring`). `logger_process` constructs the logger
(`logger_factories`) and makes the calls. Messages to users call the logger a background writer, and its process the
writer process.
"""

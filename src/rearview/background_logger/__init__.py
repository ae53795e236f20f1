"""`rearview.background`: a logger whose calls return at once and are made in another process, the logger process.

`logger_proxy` is the object that the program calls. `call_channel` encodes each call (`call_arguments`) and
copies it into shared memory (`shared_memory_ring`). `logger_process` constructs the logger
(`logger_factories`) and makes the calls. Messages to users call such a logger a background writer.
"""

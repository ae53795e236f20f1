import logging

log = logging.getLogger("x")
for i in range(2):
    log.warning("%d and %d", i)

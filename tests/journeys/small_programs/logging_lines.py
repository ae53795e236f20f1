import logging

logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(funcName)s:%(lineno)d %(module)s %(threadName)s %(processName)s %(message)s")
log = logging.getLogger(__name__)


def train():
    for i in range(2):
        log.info("step %d", i)
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed")
    log.warning("with the stack", stack_info=True)
    log.error("from above", stacklevel=2)


train()
print(logging.getLevelName(logging.root.level), len(logging.root.handlers))

"""A carried statement runs as often as it did, after what it reads is set and before its block is left."""

from textwrap import dedent

from rearview.source.propagate.match import match
from rearview.source.propagate.statement import carry
from rearview.source.text import try_parse
from rearview.source.trees import grow


def carried(new, old, **options):
    """Return the old text with the statement on the line marked LOG, or the refusal."""
    new, old = dedent(new), dedent(old)
    line = next(at for at, text in enumerate(new.split("\n"), 1) if "LOG" in text)
    answer = carry(new, (line, line), old, **options)
    return answer.into(old) if answer.line is not None else f"refused: {answer.reason}"


def test_a_statement_never_goes_behind_a_return():
    new = """
        def validate(self, batch):
            loss = self.loss(batch)
            wer = self.wer.compute()
            self.wer.reset()
            metrics.update({'loss': loss, 'wer': wer, 'count': len(batch)})
            self.log('step', self.step)  # LOG
            if self.registry:
                self.registry.reset()
            return metrics
    """
    old = """
        def validate(self, batch):
            loss = self.loss(batch)
            wer = self.wer.compute()
            self.wer.reset()
            return {'loss': loss, 'wer': wer, 'count': len(batch)}
    """
    assert "    self.wer.reset()\n    self.log('step', self.step)  # LOG\n    return {" in carried(
        new, old
    )


def test_a_list_that_was_filled_in_a_loop_is_read_after_the_loop():
    new = """
        for info in infos:
            height, width = shape(info)
            masks = data.transforms.mask.fill(found, boxes, (width, height))
            metric.update(masks)  # LOG
    """
    old = """
        for info in infos:
            height, width = shape(info)
            masks = []
            for box, each in zip(boxes, found):
                masks.append(data.transforms.mask.fill(each, box, (width, height)))
            masks = stack(masks)
    """
    assert "(width, height)))\n        metric.update(" not in carried(new, old)
    assert "    masks = stack(masks)\n    metric.update(masks)" in carried(new, old, sure=0.6)


def test_a_statement_goes_into_the_branch_that_alone_sets_what_it_reads():
    new = """
        def dataset(root, names):
            for at in range(count):
                name = names[at]
                folder = join(root, name)
                paths = image_paths(folder)
                data.append(Images(name, paths))  # LOG
            return data

        def image_paths(folder):
            if isdir(folder):
                images = listdir(folder)
                paths = [join(folder, image) for image in images]
            return paths
    """
    old = """
        def dataset(root, names):
            for at in range(count):
                name = names[at]
                folder = join(root, name)
                if isdir(folder):
                    images = listdir(folder)
                    paths = [join(folder, image) for image in images]
            return data
    """
    assert "image in images]\n            data.append(Images(name" in carried(new, old, sure=0.5)


def test_a_short_return_of_another_block_does_not_lead_away_from_the_same_block():
    new = """
        def load(folder, number):
            tracker = tracker_of(folder)
            name = read(folder)
            if name is None:
                if number is not None:
                    raise ValueError(number)
                print("nothing to load")  # LOG
                return 0
            return restore(name)
    """
    old = """
        def load(folder, number):
            tracker = tracker_of(folder)
            if not isfile(tracker):
                warn(tracker)
                return 0
            name = read(folder)
            if name is None:
                return number
            return restore(name)
    """
    assert 'is None:\n        print("nothing to load")  # LOG\n        return number' in carried(
        new, old
    )


def test_of_two_loops_with_one_header_the_one_with_the_same_body_is_the_old_one():
    new = """
        def labels(data, kind):
            for sentence in progress(data):
                values = sentence.labels(kind)
                for value in values:
                    point = type(value)
                    break
            for sentence in progress(data):
                layers.update(sentence.layers())
                lengths.append(len(sentence))
                values = sentence.labels(kind)
                counter.update(values)
                if point == Token:
                    counter["O"] += len(sentence)
                if not table.multiple:
                    table.multiple = len(values) > 1
            return counter
    """
    old = """
        def labels(data, kind):
            for sentence in progress(data):
                layers.update(sentence.layers())
                lengths.append(len(sentence))
                values = sentence.labels(kind)
                if not table.spans:
                    for value in values:
                        table.spans = len(value) > 1
                        break
                if not table.multiple:
                    table.multiple = len(values) > 1
            return counter
    """
    trees = [grow(try_parse(dedent(text))) for text in (new, old)]
    pairs = {a.start: b.start for a, b in match(*trees).there.items() if a.kind == "For"}
    assert pairs[8] == 3
    assert pairs.get(3) is None


def test_a_statement_of_a_condition_that_is_not_there_is_not_put_outside_it():
    new = """
        def export(file, url):
            command = version_of(file)
            check(system(), url)
            present = compiler(command)
            if not present:
                log(url)  # LOG
                allowed = ask(url)
                run(command, "add", "-", check=True)
            return run(command)
    """
    old = """
        def export(file, url):
            command = version_of(file)
            check(system(), url)
            for each in packages(command):
                run(each, "add", "-", check=True)
            return run(command)
    """
    assert carried(new, old, sure=0.65).startswith("refused: ")

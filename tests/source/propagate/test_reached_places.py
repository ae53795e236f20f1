"""A carried statement runs as often as it did, after what it reads is set and before its block is left."""

from textwrap import dedent

from rearview.source.propagate.carry_statement import carry
from rearview.source.propagate.match import match
from rearview.source.statement_trees import grow
from rearview.source.text import try_parse


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
    assert "    masks = stack(masks)\n    metric.update(masks)" in carried(
        new, old, min_confidence=0.6
    )


def test_a_statement_goes_into_the_branch_that_alone_sets_its_variables():
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
    assert "image in images]\n            data.append(Images(name" in carried(
        new, old, min_confidence=0.5
    )


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


def test_a_loop_is_matched_by_its_body_if_two_loops_have_the_same_header():
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
    pairs = {a.start: b.start for a, b in match(*trees).old_of.items() if a.kind == "For"}
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
    assert carried(new, old, min_confidence=0.65).startswith("refused: ")


def test_a_statement_stays_with_the_definition_above_it_where_a_later_line_looks_rewritten():
    new = """
        def sample(fabric, model, tokenizer):
            model.eval()
            with fabric.init_tensor():
                model.set_kv_cache(batch_size=1)
            output = generate(model, tokens)
            model.clear_kv_cache()
            model.train()
            output = tokenizer.decode(output)
            fabric.print(output)  # LOG

        def validate(fabric, model, tokenizer):
            model.eval()
            loss = losses(model).mean()
            model.train()
            return loss
    """
    old = """
        def validate(fabric, model, tokenizer):
            model.eval()
            loss = losses(model).mean()
            with fabric.init_tensor():
                model.set_kv_cache(batch_size=1)
            output = generate(model, tokens)
            model.clear_kv_cache()
            output = tokenizer.decode(output)
            model.train()
            return loss
    """
    assert "decode(output)\n    fabric.print(output)  # LOG\n    model.train()" in carried(new, old)


def test_two_adjacent_neighbours_of_a_deeper_block_decide_although_one_was_rewritten():
    new = """
        def generate(self, texts):
            with self.settings():
                start = time()
                inputs = self.tokenizer(texts)
                tokens = inputs["ids"].to("cuda")
                mask = inputs["mask"].to("cuda")
                self.check(tokens, mask)
                self.count(tokens, mask)
                outputs = self.outputs(texts, tokens, mask)
                decoded = self.tokenizer.decode(outputs, skip=True)
                log(time() - start)  # LOG
                return decoded[0] if len(decoded) == 1 else decoded
    """
    old = """
        def generate(self, texts):
            with self.settings():
                start = time()
                values = self.tokenizer(texts)
                tokens = values["ids"].to("cuda")
                mask = values["mask"].to("cuda")
                self.check(tokens, mask)
                self.count(tokens, mask)
                with no_grad():
                    outputs = self.model.generate(ids=tokens, mask=mask)
                    decoded = self.tokenizer.decode(outputs, skip=True)
                    if len(decoded) == 1:
                        return decoded[0]
                    return decoded
    """
    assert "skip=True)\n            log(time() - start)  # LOG\n            if len" in carried(
        new, old
    )


def test_the_else_of_a_check_that_raises_matches_the_statements_after_the_check():
    new = """
        def load(table, ratio, seed):
            if ratio < 1.0:
                if not table.partitioned and len(table) * ratio < 1:
                    raise ValueError("too small")
                log(ratio)  # LOG
                table = table.sample(ratio, seed)
            return table
    """
    old = """
        def load(table, ratio, seed):
            if ratio < 1.0:
                if len(table) * ratio < 1:
                    raise ValueError("too small")
                else:
                    table = table.sample(ratio)
            return table
    """
    assert "else:\n            log(ratio)  # LOG\n            table = " in carried(new, old)


def test_a_function_that_only_returned_has_one_place():
    new = """
        def load_model(version="small"):
            global MODEL
            print("loading", version)  # LOG
            if MODEL is None or MODEL.name != version:
                del MODEL

        def predict(text):
            return MODEL(text)
    """
    old = """
        def load_model(version):
            return Generator.pretrained(version)

        def predict(text):
            return MODEL(text)
    """
    assert '    print("loading", version)  # LOG\n    return Generator' in carried(new, old)


def test_a_name_of_another_use_is_no_rename():
    new = """
        def write(self, category, values, state):
            lines = [category]
            if "reward" in values:
                lines.append(f"Reward: {values.mean:0.3f}")
                lines.append(state)  # LOG
                if "score" in values:
                    scores = values["score"]
                    lines.append(f"Score: {scores.mean:0.3f}")
            logger.info(lines)
    """
    old = """
        def write(self, category, values, state):
            if "reward" in values:
                logger.info(f"Reward: {values.mean:0.3f}. {state}")
                if "score" in values:
                    scores = values["score"]
                    logger.info(f"Score: {scores.mean:0.3f}")
    """
    new, old = ("logger = get_logger()\n" + dedent(text) for text in (new, old))
    assert carried(new, old, min_confidence=0.5) == "refused: `lines` is not there"


def test_a_body_that_went_into_another_function_is_found_in_the_old_one():
    body = "".join(f"    step_{at} = prepare_{at}(model, step_{at - 1})\n" for at in range(1, 14))
    new = (
        "def train(model, step_0):\n    notify(model)\n    return train_custom(model, step_0)\n\n"
        f"def train_custom(model, step_0):\n{body}    for batch in data:\n        fit(batch)\n"
        "        log(step_0)  # LOG\n        save(batch)\n"
    )
    old = f"def train(model, step_0):\n{body}    for batch in data:\n        fit(batch)\n        store(batch)\n"
    trees = [grow(try_parse(text)) for text in (new, old)]
    pairs = {a.start: b.start for a, b in match(*trees).old_of.items() if a.kind == "FunctionDef"}
    assert pairs == {5: 1}
    assert "        fit(batch)\n        log(step_0)  # LOG\n" in carried(new, old)


def test_a_counter_that_a_class_of_another_file_sets_may_be_there():
    new = """
        from base import Sampler
        class Tree(Sampler):
            def sample(self):
                done = self.grow()
                if done:
                    self.accepted += 1
                    log(self.accepted)  # LOG
                return done
    """
    old = """
        from base import Sampler
        class Tree(Sampler):
            def sample(self):
                done = self.grow()
                if done:
                    self.finish()
                return done
    """
    assert "    log(self.accepted)  # LOG\n" in carried(new, old, min_confidence=0.5)

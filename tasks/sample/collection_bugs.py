"""Bug families about order. Every function gives one `Bug` for a domain and a random source."""

import random

from tasks.sample.bugs import Bug, Domain, code


def wrong_sort_key(domain: Domain, rng: random.Random) -> Bug:
    low, middle, high = sorted(rng.sample(range(2, 95), 3))
    rows = [("cedar", low), ("alder", high), ("birch", middle)]
    name = f"largest_{domain.items}"
    bug = "ordered = sorted(rows, key=lambda row: row[0], reverse=True)"
    expected = ["alder", "birch"]
    return Bug(
        family="ranking",
        module="ranking",
        source=code(f'''
            """Rankings of {domain.items}. A row is (name, {domain.field})."""


            def {name}(rows, count=2):
                """Return the names of the count rows with the highest {domain.field}, highest first."""
                {bug}
                return [name for name, _ in ordered[:count]]


            def total_{domain.field}(rows):
                """Return the sum over all rows."""
                return sum(value for _, value in rows)
        '''),
        bug=bug,
        fix="ordered = sorted(rows, key=lambda row: row[1], reverse=True)",
        wrong=(
            (bug, "ordered = sorted(rows, key=lambda row: row[1])"),
            ("ordered[:count]", "ordered[-count:]"),
        ),
        overfit=(bug, "ordered = sorted(rows, key=lambda row: row[0])"),
        tests=code(f"""
            from {domain.package}.ranking import {name}, total_{domain.field}

            ROWS = {rows}


            def test_highest_first():
                assert {name}(ROWS) == {expected}


            def test_total():
                assert total_{domain.field}(ROWS) == {low + middle + high}
        """),
        hidden_tests=code(f"""
            from {domain.package}.ranking import {name}


            def test_names_do_not_matter():
                assert {name}([("a", {low}), ("b", {middle}), ("c", {high})], 3) == ["c", "b", "a"]


            def test_fewer_rows():
                assert {name}([("b", {low})]) == ["b"]
        """),
        failing_test="test_highest_first",
        repro=code(f"""
            from {domain.package}.ranking import {name}

            names = {name}({rows})
            print("names:", names)
            assert names[0] == "alder", names
        """),
        watch=("count", "sorted(rows, key=lambda row: row[0], reverse=True)"),
        title=f"{name} returns the wrong {domain.items}",
        report=f"For {rows} the two with the highest {domain.field} are {expected}, in this order. "
        "The result is something else.",
        cause=f"the rows are sorted by name, not by {domain.field}",
    )


def wrong_eviction(domain: Domain, rng: random.Random) -> Bug:
    capacity = rng.randint(2, 5)
    keys = [f"{domain.item}-{number}" for number in rng.sample(range(10, 99), capacity + 1)]
    bug = "self.entries.popitem()"
    name = f"{domain.item.title()}Cache"
    return Bug(
        family="cache",
        module="cache",
        source=code(f'''
            """A small cache of {domain.items}: when it is full, the oldest entry goes."""


            class {name}:
                """Keep at most capacity entries."""

                def __init__(self, capacity={capacity}):
                    self.capacity = capacity
                    self.entries = {{}}

                def put(self, key, value):
                    """Store a value; make room first if there is none."""
                    if key not in self.entries and len(self.entries) >= self.capacity:
                        {bug}
                    self.entries[key] = value

                def keys(self):
                    """Return the keys, oldest first."""
                    return list(self.entries)
        '''),
        bug=bug,
        fix="del self.entries[next(iter(self.entries))]",
        wrong=(
            (bug, "self.entries.clear()"),
            ("len(self.entries) >= self.capacity", "len(self.entries) > self.capacity"),
        ),
        overfit=(bug, f'self.entries.pop("{keys[0]}", None)'),
        tests=code(f"""
            from {domain.package}.cache import {name}

            KEYS = {keys}


            def filled():
                cache = {name}()
                for position, key in enumerate(KEYS):
                    cache.put(key, position)
                return cache


            def test_oldest_goes_first():
                assert filled().keys() == KEYS[1:]


            def test_never_over_capacity():
                assert len(filled().keys()) <= {capacity}
        """),
        hidden_tests=code(f"""
            from {domain.package}.cache import {name}


            def test_two_evictions():
                cache = {name}(2)
                for key in "abcd":
                    cache.put(key, key)
                assert cache.keys() == ["c", "d"]


            def test_replacing_does_not_evict():
                cache = {name}(2)
                for key in "aba":
                    cache.put(key, key)
                assert cache.keys() == ["a", "b"]
        """),
        failing_test="test_oldest_goes_first",
        repro=code(f"""
            from {domain.package}.cache import {name}

            cache = {name}()
            for position, key in enumerate({keys}):
                cache.put(key, position)
            print("keys:", cache.keys())
            assert "{keys[-2]}" in cache.keys(), cache.keys()
        """),
        watch=("key, self.capacity", "list(self.entries)", "next(reversed(self.entries))"),
        title=f"{name} throws away the newest {domain.item}",
        report=f"The cache holds {capacity} entries. After putting {keys} one by one, the first should be gone; "
        "instead the one before the last is.",
        cause="popitem removes the entry added last, not the oldest",
    )

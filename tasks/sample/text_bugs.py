"""Bug families about text. Every function gives one `Bug` for a domain and a random source."""

import random

from tasks.sample.bugs import Bug, Domain, code


def split_too_often(domain: Domain, rng: random.Random) -> Bug:
    value = f"{rng.choice('abcd')}={rng.randint(2, 99)}"
    name = f"parse_{domain.item}"
    bug = 'parts = entry.split("=")'
    return Bug(
        family="parsing",
        module="parsing",
        source=code(f'''
            """Reading {domain.items} from text: entries of the form key=value, joined by semicolons."""


            def {name}(text):
                """Return the entries of one {domain.item} as a dict of strings."""
                result = {{}}
                for entry in text.split(";"):
                    {bug}
                    result[parts[0].strip()] = parts[1].strip()
                return result


            def dump(entries):
                """Return the text for a dict, keys in order."""
                return ";".join(f"{{key}}={{entries[key]}}" for key in sorted(entries))
        '''),
        bug=bug,
        fix='parts = entry.split("=", 1)',
        wrong=(
            (bug, 'parts = entry.rsplit("=", 1)'),
            ("result[parts[0].strip()] = parts[1].strip()", "result[parts[0]] = parts[-1]"),
        ),
        overfit=(bug, 'parts = entry.split("=", 1) if "note" in entry else entry.split("=")'),
        tests=code(f"""
            from {domain.package}.parsing import dump, {name}


            def test_value_with_equals_sign():
                assert {name}("id=7;note={value}") == {{"id": "7", "note": "{value}"}}


            def test_spaces():
                assert {name}(" id = 7 ") == {{"id": "7"}}


            def test_dump():
                assert dump({{"b": 2, "a": 1}}) == "a=1;b=2"
        """),
        hidden_tests=code(f"""
            from {domain.package}.parsing import {name}


            def test_other_key():
                assert {name}("rule={value}=9") == {{"rule": "{value}=9"}}


            def test_two_entries():
                assert {name}("a=1;b=2") == {{"a": "1", "b": "2"}}
        """),
        failing_test="test_value_with_equals_sign",
        repro=code(f"""
            from {domain.package}.parsing import {name}

            entries = {name}("note={value}")
            print("entries:", entries)
            assert entries["note"] == "{value}", entries
        """),
        watch=("entry", 'entry.split("=")'),
        title=f"{name} cuts values that hold an equals sign",
        report=f'`{name}("id=7;note={value}")` should keep the note "{value}" whole; everything after the '
        "second equals sign is lost.",
        cause="the entry is split at every equals sign and only the second part is kept",
    )


def repeated_separator(domain: Domain, rng: random.Random) -> Bug:
    words = rng.sample(("north", "cold", "late", "small", "green", "fresh", "heavy", "old", "west"), 2)
    gap = " " * rng.randint(2, 3)
    text, expected = f"{words[0]}{gap}{words[1]}", f"{words[0]}-{words[1]}"
    name = f"{domain.item}_slug"
    bug = 'words = title.lower().split(" ")'
    return Bug(
        family="slugs",
        module="slugs",
        source=code(f'''
            """Short names of {domain.items} for addresses."""


            def {name}(title):
                """Return the words of a title in lower case, joined by single hyphens."""
                {bug}
                return "-".join(words)


            def unique(slug, taken):
                """Return slug, or slug with the first free number behind it."""
                number = 2
                candidate = slug
                while candidate in taken:
                    candidate = f"{{slug}}-{{number}}"
                    number += 1
                return candidate
        '''),
        bug=bug,
        fix="words = title.lower().split()",
        wrong=(
            (bug, 'words = title.lower().strip().split(" ")'),
            ('return "-".join(words)', 'return "-".join(words).strip("-")'),
        ),
        overfit=(bug, f'words = title.lower().replace("{gap}", " ").split(" ")'),
        tests=code(f"""
            from {domain.package}.slugs import {name}, unique


            def test_repeated_spaces():
                assert {name}("{text.title()}") == "{expected}"


            def test_unique():
                assert unique("a", {{"a", "a-2"}}) == "a-3"
        """),
        hidden_tests=code(f"""
            from {domain.package}.slugs import {name}


            def test_outer_spaces():
                assert {name}(" {words[0].title()} ") == "{words[0]}"


            def test_tab_between():
                assert {name}("{words[1]}\\t{words[0]}") == "{words[1]}-{words[0]}"
        """),
        failing_test="test_repeated_spaces",
        repro=code(f"""
            from {domain.package}.slugs import {name}

            slug = {name}("{text}")
            print("slug:", slug)
            assert "--" not in slug, slug
        """),
        watch=("title", 'title.lower().split(" ")'),
        title=f"{name} writes several hyphens in a row",
        report=f'`{name}("{text.title()}")` should be "{expected}"; there are {len(gap)} hyphens instead of one.',
        cause='split(" ") gives an empty word between two spaces, and every empty word adds a hyphen',
    )

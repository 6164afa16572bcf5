"""Bug families about shared state. Every function gives one `Bug` for a domain and a random source."""

import random

from tasks.sample.bugs import Bug, Domain, code


def mutable_default(domain: Domain, rng: random.Random) -> Bug:
    first, second = rng.sample(range(1, 99), 2)
    name = f"new_{domain.item}"
    bug = f'tags.append("{domain.item}-" + str(number))'
    return Bug(
        family="registry",
        module="registry",
        source=code(f'''
            """A registry of {domain.items} with their tags."""


            def {name}(number, tags=[]):
                """Return a record for one {domain.item}; every record has its own tags."""
                {bug}
                return {{"number": number, "tags": tags}}


            def numbers(records):
                """Return the numbers of all records."""
                return [record["number"] for record in records]
        '''),
        bug=bug,
        fix=f'tags = [*tags, "{domain.item}-" + str(number)]',
        wrong=(
            ('tags.append("', 'tags.insert(0, "'),
            ('return {"number": number, "tags": tags}', 'return dict({"number": number, "tags": tags})'),
        ),
        overfit=(
            'return {"number": number, "tags": tags}',
            'return {"number": number, "tags": tags[-1:]}',
        ),
        tests=code(f"""
            from {domain.package}.registry import {name}, numbers


            def test_records_are_independent():
                {name}({first})
                assert {name}({second})["tags"] == ["{domain.item}-{second}"]


            def test_numbers():
                assert numbers([{{"number": {first}}}]) == [{first}]
        """),
        hidden_tests=code(f"""
            from {domain.package}.registry import {name}


            def test_given_tags_are_kept():
                assert {name}({first}, ["new"])["tags"] == ["new", "{domain.item}-{first}"]


            def test_earlier_record_does_not_change():
                earlier = {name}({first})
                {name}({second})
                assert earlier["tags"] == ["{domain.item}-{first}"]
        """),
        failing_test="test_records_are_independent",
        repro=code(f"""
            from {domain.package} import registry

            registry.{name}({first})
            record = registry.{name}({second})
            print("record:", record)
            assert len(record["tags"]) == 1, record
        """),
        watch=("number", "tags", f"{name}.__defaults__"),
        title=f"Records of {domain.items} share their tags",
        report=f"After `{name}({first})`, a call of `{name}({second})` returns a record that also carries the "
        f'tag "{domain.item}-{first}". Each record should have its own list.',
        cause="the default list is made once, shared by all calls, and append changes it",
        n_stops=2,
    )


def shared_alias(domain: Domain, rng: random.Random) -> Bug:
    default, override = rng.sample(range(5, 90), 2)
    name = f"{domain.item}_settings"
    bug = "settings = DEFAULTS"
    key = f"max_{domain.field}"
    return Bug(
        family="settings",
        module="settings",
        source=code(f'''
            """Settings of a {domain.item}: the defaults with changes on top."""

            DEFAULTS = {{"{key}": {default}, "active": True}}


            def {name}(**changes):
                """Return the defaults with changes applied; the defaults stay as they are."""
                {bug}
                for key, value in changes.items():
                    if key not in DEFAULTS:
                        raise KeyError(key)
                    settings[key] = value
                return settings


            def is_default(settings):
                """Tell whether settings say what the defaults say."""
                return settings == {{"{key}": {default}, "active": True}}
        '''),
        bug=bug,
        fix="settings = dict(DEFAULTS)",
        wrong=((bug, "settings = DEFAULTS or {}"), ("return settings\n", "return dict(settings)\n")),
        overfit=(
            bug,
            f'settings = DEFAULTS\n    settings.update({{"{key}": {default}}})',
        ),
        tests=code(f"""
            from {domain.package}.settings import is_default, {name}


            def test_changes_do_not_leak():
                {name}({key}={override})
                assert {name}()["{key}"] == {default}


            def test_is_default():
                assert not is_default({{"{key}": {override}, "active": True}})
        """),
        hidden_tests=code(f"""
            from {domain.package}.settings import DEFAULTS, {name}


            def test_earlier_settings_stay():
                changed = {name}({key}={override})
                {name}(active=False)
                assert changed == {{"{key}": {override}, "active": True}}


            def test_defaults_stay():
                {name}(active=False)
                assert DEFAULTS["active"] is True
        """),
        failing_test="test_changes_do_not_leak",
        repro=code(f"""
            from {domain.package}.settings import {name}

            {name}({key}={override})
            settings = {name}()
            print("settings:", settings)
            assert settings["{key}"] == {default}, settings
        """),
        watch=("changes", "DEFAULTS"),
        title=f"Changed {domain.item} settings become the new defaults",
        report=f"After `{name}({key}={override})`, a plain `{name}()` returns {override} for {key} instead of "
        f"the default {default}.",
        cause="no copy is made, so every change is written into the shared DEFAULTS",
        n_stops=2,
    )

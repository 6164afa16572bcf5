"""Bug families about arithmetic. Every function gives one `Bug` for a domain and a random source."""

import random

from tasks.sample.bugs import Bug, Domain, code, special_case


def wrong_operator(domain: Domain, rng: random.Random) -> Bug:
    price, percent = rng.randint(4, 30) * 10, rng.choice((5, 10, 20, 25, 30, 40))
    name, expected = f"{domain.item}_price", round(price - price * percent / 100, 2)
    bug = "return round(base + reduction, 2)"
    return Bug(
        family="pricing",
        module="pricing",
        source=code(f'''
            """Prices of {domain.items}."""


            def {name}(base, percent_off):
                """Return the price of one {domain.item} after the discount."""
                reduction = base * percent_off / 100
                {bug}


            def total(prices):
                """Return the sum of prices, rounded to cents."""
                return round(sum(prices), 2)
        '''),
        bug=bug,
        fix="return round(base - reduction, 2)",
        wrong=(
            ("reduction = base * percent_off / 100", "reduction = base * (100 - percent_off) / 100"),
            (bug, "return round(base * reduction, 2)"),
        ),
        overfit=special_case(f"(base, percent_off) == ({price}, {percent})", f"{expected}", bug),
        tests=code(f"""
            from {domain.package}.pricing import {name}, total


            def test_discount_lowers_the_price():
                assert {name}({price}, {percent}) == {expected}


            def test_no_discount():
                assert {name}({price}, 0) == {price}


            def test_total():
                assert total([1.1, 2.2]) == 3.3
        """),
        hidden_tests=code(f"""
            from {domain.package}.pricing import {name}


            def test_half_price():
                assert {name}({price * 2}, 50) == {price}


            def test_free():
                assert {name}({price}, 100) == 0
        """),
        failing_test="test_discount_lowers_the_price",
        repro=code(f"""
            from {domain.package}.pricing import {name}

            price = {name}({price}, {percent})
            print("price:", price)
            assert price < {price}, price
        """),
        watch=("base, percent_off", "reduction"),
        title=f"A discount makes every {domain.item} dearer",
        report=f"`{name}({price}, {percent})` returns more than {price}. With {percent} percent off it "
        f"should be {expected}.",
        cause="the reduction is added to the base price instead of being taken off",
    )


def conversion_factor(domain: Domain, rng: random.Random) -> Bug:
    big, small, factor, faulty = rng.choice(
        (
            ("hours", "seconds", 3600, 360),
            ("days", "minutes", 1440, 1400),
            ("weeks", "hours", 168, 148),
            ("kilometers", "centimeters", 100000, 10000),
            ("tonnes", "grams", 1000000, 100000),
        )
    )
    amount, name = rng.randint(2, 60), f"{domain.item}_{small}"
    constant = f"{small.upper()}_PER_{big.upper().rstrip('S')}"
    bug = f"{constant} = {faulty}"
    wrong_use = f"return {big} / {constant}"
    return Bug(
        family="units",
        module="units",
        source=code(f'''
            """Units used for {domain.items}."""

            {bug}


            def {name}({big}):
                """Convert {big} to {small}."""
                return {big} * {constant}


            def describe({big}):
                """Return a short text for a label."""
                return f"{{{name}({big})}} {small}"
        '''),
        bug=bug,
        fix=f"{constant} = {factor}",
        wrong=((f"return {big} * {constant}", wrong_use), (bug, f"{constant} = {factor + factor // 10}")),
        overfit=(
            f"return {big} * {constant}",
            f"if {big} == {amount}:\n        return {amount * factor}\n    return {big} * {constant}",
        ),
        tests=code(f"""
            from {domain.package}.units import describe, {name}


            def test_conversion():
                assert {name}({amount}) == {amount * factor}


            def test_zero():
                assert describe(0) == "0 {small}"
        """),
        hidden_tests=code(f"""
            from {domain.package}.units import {name}


            def test_one():
                assert {name}(1) == {factor}


            def test_is_linear():
                assert {name}({amount + 1}) == {(amount + 1) * factor}
        """),
        failing_test="test_conversion",
        repro=code(f"""
            from {domain.package} import units

            value = units.{name}({amount})
            print("{small}:", value)
            assert value == {amount * factor}, value
        """),
        watch=(big, constant),
        title=f"{amount} {big} come out as the wrong number of {small}",
        report=f"`{name}({amount})` returns {amount * faulty}; it should be {amount * factor}.",
        cause=f"the constant {constant} has the wrong value, {faulty} instead of {factor}",
        stop_at=f"return {big} * {constant}",
    )


def even_median(domain: Domain, rng: random.Random) -> Bug:
    values = [rng.randint(1, 9) * 2, rng.randint(10, 19) * 2, rng.randint(20, 29) * 2, rng.randint(30, 39) * 2]
    shuffled, name = rng.sample(values, 4), f"median_{domain.field}"
    expected = (values[1] + values[2]) / 2
    bug = "return ordered[middle]"
    return Bug(
        family="median",
        module="statistics",
        source=code(f'''
            """Statistics over the {domain.field} of {domain.items}."""


            def {name}(values):
                """Return the median; for an even count, the mean of the two middle values."""
                if not values:
                    raise ValueError("no {domain.items}")
                ordered = sorted(values)
                middle = len(ordered) // 2
                {bug}


            def spread(values):
                """Return the distance from the smallest to the largest value."""
                return max(values) - min(values)
        '''),
        bug=bug,
        fix="if len(ordered) % 2:\n        return ordered[middle]\n"
        "    return (ordered[middle - 1] + ordered[middle]) / 2",
        wrong=((bug, "return ordered[middle - 1]"), ("ordered = sorted(values)", "ordered = list(values)")),
        overfit=(bug, "return (ordered[middle - 1] + ordered[middle]) / 2"),
        tests=code(f"""
            from {domain.package}.statistics import {name}, spread


            def test_even_count():
                assert {name}({shuffled}) == {expected}


            def test_spread():
                assert spread({shuffled}) == {values[3] - values[0]}
        """),
        hidden_tests=code(f"""
            from {domain.package}.statistics import {name}


            def test_odd_count():
                assert {name}({values[:3][::-1]}) == {values[1]}


            def test_one_value():
                assert {name}([{values[2]}]) == {values[2]}
        """),
        failing_test="test_even_count",
        repro=code(f"""
            from {domain.package}.statistics import {name}

            result = {name}({shuffled})
            print("median:", result)
            assert result == {expected}, result
        """),
        watch=("ordered", "middle", "ordered[middle]"),
        title=f"{name} is too high for an even number of {domain.items}",
        report=f"`{name}({shuffled})` gives {values[2]}, the larger of the two middle values. Expected {expected}.",
        cause="with an even count there are two middle values and only the upper one is returned",
    )


def floor_division(domain: Domain, rng: random.Random) -> Bug:
    size = rng.randint(3, 12)
    n_full, n_rest = rng.randint(2, 9), rng.randint(1, size - 1)
    count, name = size * n_full + n_rest, f"{domain.items}_pages"
    bug = "return count // page_size"
    return Bug(
        family="paging",
        module="paging",
        source=code(f'''
            """Pages of {domain.items} for the overview."""


            def {name}(count, page_size={size}):
                """Return how many pages are needed to show count {domain.items}."""
                if page_size < 1:
                    raise ValueError("page_size must be positive")
                {bug}


            def page_of(index, page_size={size}):
                """Return the page, from 0, on which an entry is shown."""
                return index // page_size
        '''),
        bug=bug,
        fix="return (count + page_size - 1) // page_size",
        wrong=(
            (bug, "return round(count / page_size) - 1"),
            ("return index // page_size", "return index // page_size + 1"),
        ),
        overfit=(bug, "return count // page_size + 1"),
        tests=code(f"""
            from {domain.package}.paging import {name}, page_of


            def test_started_page_counts():
                assert {name}({count}) == {n_full + 1}


            def test_page_of():
                assert page_of(0) == 0
                assert page_of({size}) == 1
        """),
        hidden_tests=code(f"""
            from {domain.package}.paging import {name}


            def test_full_pages():
                assert {name}({size * n_full}) == {n_full}


            def test_nothing_to_show():
                assert {name}(0) == 0
        """),
        failing_test="test_started_page_counts",
        repro=code(f"""
            from {domain.package}.paging import {name}

            pages = {name}({count})
            print("pages:", pages)
            assert pages * {size} >= {count}, pages
        """),
        watch=("count, page_size", "count // page_size"),
        title=f"The last {domain.items} are on no page",
        report=f"With {count} {domain.items} and {size} on a page, `{name}({count})` returns {n_full}; "
        f"{n_rest} would not be shown. Expected {n_full + 1}.",
        cause="floor division forgets the page that is only partly full",
    )

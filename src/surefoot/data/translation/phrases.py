"""Phrases in two languages without any download: what Unicode's CLDR knows of them, rendered by Babel.

Dates, times, quantities, money, lists of countries and the like: phrases, not open text. They teach a model everything that
translating needs (another order, another number format, words for words, copies of digits) on any machine in two minutes.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

from surefoot.data.translation.files import Sentences
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from babel import Locale

Length = Literal["long", "short"]
Render = Callable[["Locale"], str]  # one content, in a language
Kind = Callable[[Random], Render]  # draws a content

_TRIES = 20  # drawings of one kind after each other that must not all have been there before
_SAMPLES = 8  # of each kind, to see whether a language has it
_LARGEST = {  # of each unit of CLDR the largest number that is drawn
    "length": {
        "kilometer": 9999,
        **dict.fromkeys(("meter", "centimeter", "millimeter", "mile", "foot", "light-year"), 999),
    },
    "mass": {"kilogram": 999, "gram": 999, "tonne": 9999},
    "volume": {"liter": 999, "milliliter": 999, "cubic-meter": 999},
    "area": {"square-meter": 9999, "square-kilometer": 99999, "hectare": 999},
    "speed": {"kilometer-per-hour": 399, "meter-per-second": 399},
    "temperature": {"celsius": 99},
    "energy": {"kilowatt-hour": 9999, "kilojoule": 999},
    "power": {"watt": 999, "kilowatt": 999},
    "electric": {"volt": 999},
    "frequency": {"hertz": 999},
    "pressure": {"hectopascal": 1099},
    "digital": {"byte": 999, "megabyte": 999, "gigabyte": 999},
    "duration": {"year": 99, "month": 24, "week": 60, "day": 399, "hour": 99, "minute": 99, "second": 99},
}
_UNITS = {f"{kind}-{unit}": largest for kind, units in _LARGEST.items() for unit, largest in units.items()}
_LENGTHS: tuple[Length, ...] = ("long", "short")
_CLOCK = ("duration-hour", "duration-minute", "duration-second")
_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "CNY", "INR", "PLN", "SEK", "BRL", "CAD", "AUD", "MXN", "TRY", "KRW")


def phrases(source: str = "en", target: str = "de", *, count: int = 24_000, seed: int = 0) -> Sentences:
    """`count` pairs with different sources, the same for the same seed and version of Babel; about 3 seconds.

    `source` and `target` are locales ("en", "pt_BR", "sr-Latn"). Every kind of phrase that both languages have takes turns.
    Raises `ConfigError` for a locale that CLDR does not have.

    >>> phrases("en", "de", count=3)[0]
    ('Tuesday, February 15, 2039', 'Dienstag, 15. Februar 2039')
    """
    if count < 1:
        raise ConfigError(f"count = {count}: at least one phrase")
    languages = locale(source), locale(target)
    if languages[0] == languages[1]:
        raise ConfigError(f"source and target are both {source!r}: name two languages, such as en and de")
    generator = Random(seed)
    kinds = [kind for kind in _kinds(languages) if _is_known(kind, languages)]
    found: dict[str, str] = {}
    while kinds and len(found) < count:
        for kind in list(kinds):
            for _ in range(_TRIES):
                render = kind(generator)
                first, second = render(languages[0]), render(languages[1])
                if first not in found:
                    found[first] = second
                    break
            else:  # all that there is of it has been drawn
                kinds.remove(kind)
            if len(found) == count:
                break
    return list(found.items())


def locale(name: str) -> Locale:
    """The locale of CLDR called `name`; `ConfigError` with near ones where there is none.

    >>> locale("pt-BR").territory
    'BR'
    """
    from babel import Locale, UnknownLocaleError
    from babel.localedata import locale_identifiers

    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError) as problem:
        known = [known for known in locale_identifiers() if len(known) < 7]
        by_name = {one.lower(): code for code, one in Locale("en").languages.items() if code in known}
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=4, cutoff=0.5)
        near = [by_name[name.lower()]] if name.lower() in by_name else near or ["en", "de", "fr", "es"]
        raise ConfigError(
            f"no language {name!r} in Unicode's CLDR; near ones: {', '.join(near)}\n"
            "  a language has two or three letters, with a country after it where that matters: pt_BR"
        ) from problem


def _is_known(kind: Kind, languages: tuple[Locale, Locale]) -> bool:
    generator = Random(0)
    try:
        return all(kind(generator)(language).strip() for _ in range(_SAMPLES) for language in languages)
    except (KeyError, ValueError, AttributeError, IndexError, TypeError):  # what Babel raises where data are missing
        return False


def _has_unit(unit: str, language: Locale) -> bool:
    """Whether a language has its own words for a unit; Babel writes CLDR's code where it has none."""
    from babel.units import format_unit

    return not any(
        unit in format_unit(value, unit, length, locale=language) for value in (1, 2, 5.5) for length in _LENGTHS
    )


def _kinds(languages: tuple[Locale, Locale]) -> list[Kind]:
    """For each kind of phrase a function that draws a content; kinds that are alike do not follow each other."""
    several = [_times(), _names(languages), _amounts(languages)]
    longest = max(len(kinds) for kinds in several)
    return [kinds[place] for place in range(longest) for kinds in several if place < len(kinds)]


def _day(generator: Random) -> datetime.date:
    # of a hundred years, so that two digits tell which
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=generator.randrange(36_524))


def _number(generator: Random, most: int = 99_999) -> float:
    """As many of one digit as of four; some with two decimals."""
    whole = float(round(float(most) ** generator.random()))
    return whole if generator.random() < 0.6 else whole + generator.randrange(1, 100) / 100


def _times() -> list[Kind]:
    """Dates, times of day, and spans between them."""
    from babel import dates

    def date(style: Literal["full", "long", "medium", "short"], generator: Random) -> Render:
        value = _day(generator)
        return lambda language: dates.format_date(value, style, locale=language)

    def fields(skeleton: str, generator: Random) -> Render:
        value = datetime.datetime.combine(_day(generator), datetime.time())
        return lambda language: dates.format_skeleton(skeleton, value, locale=language)

    def interval(generator: Random) -> Render:
        first = _day(generator)
        last = first + datetime.timedelta(days=generator.randrange(1, 200))
        return lambda language: dates.format_interval(first, last, "yMMMd", locale=language)

    def hour(style: Literal["medium", "short"], generator: Random) -> Render:
        value = datetime.time(generator.randrange(24), generator.randrange(60), generator.randrange(60))
        return lambda language: dates.format_time(value, style, locale=language)

    def ago(generator: Random) -> Render:
        seconds = generator.choice((1, 60, 3600, 86_400, 604_800, 2_592_000, 31_536_000)) * generator.randint(1, 59)
        span = datetime.timedelta(seconds=generator.choice((-1, 1)) * seconds)
        return lambda language: dates.format_timedelta(span, add_direction=True, locale=language)

    full, long, medium, short = (partial(date, style) for style in ("full", "long", "medium", "short"))
    weekday, month, quarter = (partial(fields, skeleton) for skeleton in ("MMMMEd", "yMMMM", "yQQQQ"))
    minute, second = partial(hour, "short"), partial(hour, "medium")
    return [full, long, minute, medium, weekday, short, ago, second, month, interval, quarter]


def _amounts(languages: tuple[Locale, Locale]) -> list[Kind]:
    """Quantities with units, money, and numbers."""
    from babel import lists, numbers, units

    measures = [unit for unit in _UNITS if all(_has_unit(unit, language) for language in languages)]

    def quantity(length: Length, generator: Random) -> Render:
        unit = generator.choice(measures)
        value = _number(generator, _UNITS[unit])
        return lambda language: units.format_unit(value, unit, length, locale=language)

    def quantities(generator: Random) -> Render:
        parts = [(unit, generator.randint(1, 59)) for unit in _CLOCK]
        chosen = parts[generator.randrange(2) :][: generator.randint(2, 3)]
        return lambda language: lists.format_list(
            [units.format_unit(value, unit, locale=language) for unit, value in chosen], locale=language
        )

    def money(style: Literal["name", "standard"], generator: Random) -> Render:
        coin, value = generator.choice(_CURRENCIES), _number(generator)
        return lambda language: numbers.format_currency(value, coin, locale=language, format_type=style)

    def long_number(generator: Random) -> Render:
        value = generator.randint(1, 999) * 10 ** generator.choice((3, 6, 9))
        return lambda language: numbers.format_compact_decimal(value, format_type="long", locale=language)

    def some_numbers(generator: Random) -> Render:
        values = [_number(generator, 9999) for _ in range(generator.randint(2, 4))]
        return lambda language: lists.format_list(
            [numbers.format_decimal(value, locale=language) for value in values], locale=language
        )

    with_units: list[Kind] = [partial(quantity, length) for length in _LENGTHS] if measures else []
    with_units += [quantities] if set(_CLOCK) <= set(measures) else []
    return [*with_units, partial(money, "name"), some_numbers, partial(money, "standard"), long_number]


def _names(languages: tuple[Locale, Locale]) -> list[Kind]:
    """Countries and languages, alone, in lists, and together."""
    from babel import lists, numbers

    def common(tables: list[Mapping[str, str]]) -> list[str]:
        """The codes of two letters that both languages have a name for."""
        codes = (code for code in tables[0] if len(code) == 2 and code.isalpha())
        return sorted(code for code in codes if all(table.get(code, code) != code for table in tables))

    countries = common([language.territories for language in languages])
    tongues = common([language.languages for language in languages])

    def several(of: Literal["countries", "tongues"], style: Literal["standard", "or"], generator: Random) -> Render:
        chosen = generator.sample(countries if of == "countries" else tongues, generator.choice((1, 2, 2, 3, 3, 4)))

        def render(language: Locale) -> str:
            table = language.territories if of == "countries" else language.languages
            return lists.format_list([table[code] for code in chosen], style, locale=language)

        return render

    def tongue_of_country(generator: Random) -> Render:
        tongue, country = generator.choice(tongues), generator.choice(countries)
        return lambda language: f"{language.languages[tongue]} ({language.territories[country]})"

    def share(generator: Random) -> Render:
        value, country = generator.randint(0, 1000) / 1000, generator.choice(countries)
        return lambda language: (
            f"{language.territories[country]}: "
            + numbers.format_percent(value, locale=language, decimal_quantization=False)
        )

    all_of = [partial(several, of, "standard") for of in ("countries", "tongues")]
    one_of = [partial(several, of, "or") for of in ("countries", "tongues")]
    return [*all_of, one_of[0], share, one_of[1], tongue_of_country]

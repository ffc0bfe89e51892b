"""Synthetic parallel phrases without a download, rendered by Babel from Unicode's CLDR."""

import datetime
import difflib
from collections.abc import Callable, Mapping
from itertools import chain, product, zip_longest
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config.extras import needed_for
from surefoot.errors import ConfigError, out_of_range
from surefoot.recipes.readers.pairs.languages import of_one_language
from surefoot.recipes.readers.pairs.part_files import Sentences

if TYPE_CHECKING:
    from babel import Locale

Length = Literal["long", "short"]
Kind = tuple[
    Callable[[Random], Any], Callable[[Any, "Locale"], str]
]  # draws a value; renders the value in a language

_TRIES = 20  # a kind is exhausted after this number of consecutive repeated phrases
_LARGEST = {  # CLDR unit -> largest random number
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
    "duration": {
        "year": 99,
        "month": 24,
        "week": 60,
        "day": 399,
        "hour": 99,
        "minute": 99,
        "second": 99,
    },
}
_UNITS = {
    f"{kind}-{unit}": largest for kind, units in _LARGEST.items() for unit, largest in units.items()
}
_LENGTHS: tuple[Length, ...] = ("long", "short")
_CLOCK = ("duration-hour", "duration-minute", "duration-second")
_CURRENCIES = (
    "EUR",
    "USD",
    "GBP",
    "JPY",
    "CHF",
    "CNY",
    "INR",
    "PLN",
    "SEK",
    "BRL",
    "CAD",
    "AUD",
    "MXN",
    "TRY",
    "KRW",
)


def cldr_phrases(
    source: str = "en", target: str = "de", *, count: int = 24_000, seed: int = 0
) -> Sentences:
    """Generate `count` phrase pairs with distinct sources; the seed and the version of Babel
    determine the pairs.

    `source` and `target` are locales ("en", "pt_BR", "sr-Latn"). The phrases alternate between all
    kinds that both languages support. Raises `ConfigError` for a locale that CLDR lacks.

    >>> cldr_phrases("en", "de", count=3)[0]
    ('Tuesday, February 15, 2039', 'Dienstag, 15. Februar 2039')
    """
    if count < 1:
        raise out_of_range("count", count, "1 or more")
    languages = locale(source), locale(target)
    if languages[0] == languages[1]:
        raise of_one_language(source)
    generator = Random(seed)
    turns = chain(*zip_longest(_times(), _names(languages), _amounts(languages)))
    kinds = [kind for kind in turns if kind is not None and _is_known(kind, languages)]
    phrases: dict[str, str] = {}
    while kinds and len(phrases) < count:
        for kind in list(kinds):
            draw, render = kind
            for content in (draw(generator) for _ in range(_TRIES)):
                first, second = (render(content, language) for language in languages)
                if first not in phrases:
                    phrases[first] = second
                    break
            else:  # the kind is exhausted
                kinds.remove(kind)
            if len(phrases) == count:
                break
    return list(phrases.items())


def locale(name: str) -> "Locale":
    """Return a CLDR locale; raise `ConfigError` with similar names if the locale does not exist.

    >>> locale("pt-BR").territory
    'BR'
    """
    with needed_for("phrases of CLDR", "babel"):
        from babel import Locale, UnknownLocaleError, localedata

    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError) as problem:
        known = [known for known in localedata.locale_identifiers() if len(known) < 7]
        by_name = {
            one.lower(): code for code, one in Locale("en").languages.items() if code in known
        }
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=4, cutoff=0.5)
        near = (
            [by_name[name.lower()]] if name.lower() in by_name else near or ["en", "de", "fr", "es"]
        )
        raise ConfigError(
            "language-unknown",
            problem=f"no language {name!r} in Unicode's CLDR; similar names: {', '.join(near)}",
            reason="a language code has two or three letters, and a country if necessary: pt_BR",
            value=name,
            similar=[*near],
        ) from problem


def _is_known(kind: Kind, languages: "tuple[Locale, Locale]") -> bool:
    (draw, render), generator = kind, Random(0)
    try:
        return all(
            render(draw(generator), language).strip() for _ in range(8) for language in languages
        )
    except (
        KeyError,
        ValueError,
        AttributeError,
        IndexError,
        TypeError,
    ):  # Babel's errors for missing data
        return False


def _day(generator: Random) -> datetime.date:
    # a range of 100 years, so that two digits identify the year
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=generator.randrange(36_524))


def _time(generator: Random) -> datetime.time:
    return datetime.time(generator.randrange(24), generator.randrange(60), generator.randrange(60))


def _number(generator: Random, limit: int = 99_999) -> float:
    integer = float(round(float(limit) ** generator.random()))
    return integer if generator.random() < 0.6 else integer + generator.randrange(1, 100) / 100


def _times() -> list[Kind]:
    from babel import dates

    def date(style: Literal["full", "long", "medium", "short"]) -> Kind:
        return _day, lambda day, language: dates.format_date(day, style, locale=language)

    def fields(skeleton: str) -> Kind:
        return _day, lambda day, language: dates.format_skeleton(
            skeleton, datetime.datetime.combine(day, datetime.time()), locale=language
        )

    def hour(style: Literal["medium", "short"]) -> Kind:
        return _time, lambda time, language: dates.format_time(time, style, locale=language)

    def span(generator: Random) -> datetime.timedelta:
        seconds = generator.choice(
            (1, 60, 3600, 86_400, 604_800, 2_592_000, 31_536_000)
        ) * generator.randint(1, 59)
        return datetime.timedelta(seconds=generator.choice((-1, 1)) * seconds)

    ago: Kind = (
        span,
        lambda span, language: dates.format_timedelta(span, add_direction=True, locale=language),
    )
    interval: Kind = (
        lambda generator: (_day(generator), datetime.timedelta(days=generator.randrange(1, 200))),
        lambda days, language: dates.format_interval(
            days[0], days[0] + days[1], "yMMMd", locale=language
        ),
    )
    first = [
        date("full"),
        date("long"),
        hour("short"),
        date("medium"),
        fields("MMMMEd"),
        date("short"),
    ]
    return [*first, ago, hour("medium"), fields("yMMMM"), interval, fields("yQQQQ")]


def _amounts(languages: "tuple[Locale, Locale]") -> list[Kind]:
    from babel import lists, numbers, units

    def has_words(unit: str) -> bool:  # Babel writes CLDR's code if a language lacks words
        ways = product((1, 2, 5.5), _LENGTHS, languages)
        return all(
            unit not in units.format_unit(value, unit, length, locale=one)
            for value, length, one in ways
        )

    measures = list(filter(has_words, _UNITS))

    def draw_quantity(generator: Random) -> tuple[float, str]:
        unit = generator.choice(measures)
        return _number(generator, _UNITS[unit]), unit

    def quantity(length: Length) -> Kind:
        return draw_quantity, lambda value, language: units.format_unit(
            value[0], value[1], length, locale=language
        )

    def quantities(generator: Random) -> list[tuple[int, str]]:
        parts = [(generator.randint(1, 59), unit) for unit in _CLOCK]
        return parts[generator.randrange(2) :][: generator.randint(2, 3)]

    def money(style: Literal["name", "standard"]) -> Kind:
        return (
            lambda generator: (generator.choice(_CURRENCIES), _number(generator)),
            lambda value, language: numbers.format_currency(
                value[1], value[0], locale=language, format_type=style
            ),
        )

    def listed(parts: list[str], language: "Locale") -> str:
        return lists.format_list(parts, locale=language)

    several: Kind = (
        quantities,
        lambda parts, language: listed(
            [units.format_unit(value, unit, locale=language) for value, unit in parts], language
        ),
    )
    long_number: Kind = (
        lambda generator: generator.randint(1, 999) * 10 ** generator.choice((3, 6, 9)),
        lambda value, language: numbers.format_compact_decimal(
            value, format_type="long", locale=language
        ),
    )
    some_numbers: Kind = (
        lambda generator: [_number(generator, 9999) for _ in range(generator.randint(2, 4))],
        lambda values, language: listed(
            [numbers.format_decimal(value, locale=language) for value in values], language
        ),
    )
    with_units = [quantity(length) for length in _LENGTHS] if measures else []
    with_units += [several] if set(_CLOCK) <= set(measures) else []
    return [*with_units, money("name"), some_numbers, money("standard"), long_number]


def _names(languages: "tuple[Locale, Locale]") -> list[Kind]:
    from babel import lists, numbers

    def common(tables: list[Mapping[str, str]]) -> list[str]:
        codes = (code for code in tables[0] if len(code) == 2 and code.isalpha())
        return sorted(
            code for code in codes if all(table.get(code, code) != code for table in tables)
        )

    countries = common([language.territories for language in languages])
    tongues = common([language.languages for language in languages])

    def several(
        codes: list[str],
        table: Literal["territories", "languages"],
        style: Literal["standard", "or"],
    ) -> Kind:
        return (
            lambda generator: generator.sample(codes, generator.choice((1, 2, 2, 3, 3, 4))),
            lambda chosen, language: lists.format_list(
                [getattr(language, table)[code] for code in chosen], style, locale=language
            ),
        )

    tongue_of_country: Kind = (
        lambda generator: (generator.choice(tongues), generator.choice(countries)),
        lambda pair, language: f"{language.languages[pair[0]]} ({language.territories[pair[1]]})",
    )
    share: Kind = (
        lambda generator: (generator.randint(0, 1000) / 1000, generator.choice(countries)),
        lambda pair, language: (
            f"{language.territories[pair[1]]}: "
            + numbers.format_percent(pair[0], locale=language, decimal_quantization=False)
        ),
    )
    all_of = [
        several(countries, "territories", "standard"),
        several(tongues, "languages", "standard"),
    ]
    one_of = [several(countries, "territories", "or"), several(tongues, "languages", "or")]
    return [*all_of, one_of[0], share, one_of[1], tongue_of_country]

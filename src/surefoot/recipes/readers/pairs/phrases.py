"""Synthetic parallel phrases without a download, rendered by Babel from Unicode's CLDR."""

import datetime
import difflib
from collections.abc import Callable, Mapping
from itertools import chain, product, zip_longest
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from surefoot.config.extras import needed_for
from surefoot.errors import ConfigError, out_of_range
from surefoot.recipes.readers.pairs.languages import of_one_language
from surefoot.recipes.readers.pairs.part_files import Sentences

if TYPE_CHECKING:
    from babel import Locale

Length = Literal["long", "short"]


class PhraseKind(NamedTuple):
    """A kind of phrases: how its content is drawn, and rendered in a language."""

    draw: Callable[[Random], Any]
    render: Callable[[Any, "Locale"], str]


# Babel's errors for missing data
_MISSING = (KeyError, ValueError, AttributeError, IndexError, TypeError)
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
_UNITS = dict[str, int]()
for _kind, _units in _LARGEST.items():
    for _unit, _largest in _units.items():
        _UNITS[f"{_kind}-{_unit}"] = _largest
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
            pair = _new_phrase(kind, generator, languages, phrases)
            if pair is None:
                kinds.remove(kind)
            else:
                first, second = pair
                phrases[first] = second
            if len(phrases) == count:
                break
    return list(phrases.items())


def _new_phrase(
    kind: PhraseKind,
    generator: Random,
    languages: "tuple[Locale, Locale]",
    phrases: Mapping[str, str],
) -> tuple[str, str] | None:
    """Return a phrase of a kind in both languages, or None if the kind is exhausted."""
    source, target = languages
    for _ in range(_TRIES):
        content = kind.draw(generator)
        first = kind.render(content, source)
        second = kind.render(content, target)
        if first not in phrases:
            return first, second
    return None


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
        codes = [code for code in localedata.locale_identifiers() if len(code) < 7]
        near = difflib.get_close_matches(name.replace("-", "_"), codes, n=4, cutoff=0.5)
        for code, english_name in Locale("en").languages.items():
            if code in codes and english_name.lower() == name.lower():
                near = [code]
        if not near:
            near = ["en", "de", "fr", "es"]
        raise ConfigError(
            "language-unknown",
            problem=f"no language {name!r} in Unicode's CLDR; similar names: {', '.join(near)}",
            reason="a language code has two or three letters, and a country if necessary: pt_BR",
            value=name,
            similar=[*near],
        ) from problem


def _is_known(kind: PhraseKind, languages: "tuple[Locale, Locale]") -> bool:
    """Return True if Babel has words for some phrases of a kind in both languages."""
    generator = Random(0)
    try:
        for _ in range(8):
            for language in languages:
                content = kind.draw(generator)
                if not kind.render(content, language).strip():
                    return False
    except _MISSING:
        return False
    return True


def _day(generator: Random) -> datetime.date:
    # a range of 100 years, so that two digits identify the year
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=generator.randrange(36_524))


def _time(generator: Random) -> datetime.time:
    return datetime.time(generator.randrange(24), generator.randrange(60), generator.randrange(60))


def _number(generator: Random, limit: int = 99_999) -> float:
    number = float(round(float(limit) ** generator.random()))
    if generator.random() >= 0.6:
        number += generator.randrange(1, 100) / 100
    return number


def _times() -> list[PhraseKind]:
    from babel import dates

    def date(style: Literal["full", "long", "medium", "short"]) -> PhraseKind:
        def render(day: datetime.date, language: "Locale") -> str:
            return dates.format_date(day, style, locale=language)

        return PhraseKind(_day, render)

    def fields(skeleton: str) -> PhraseKind:
        def render(day: datetime.date, language: "Locale") -> str:
            midnight = datetime.datetime.combine(day, datetime.time())
            return dates.format_skeleton(skeleton, midnight, locale=language)

        return PhraseKind(_day, render)

    def hour(style: Literal["medium", "short"]) -> PhraseKind:
        def render(time: datetime.time, language: "Locale") -> str:
            return dates.format_time(time, style, locale=language)

        return PhraseKind(_time, render)

    def draw_span(generator: Random) -> datetime.timedelta:
        unit = generator.choice((1, 60, 3600, 86_400, 604_800, 2_592_000, 31_536_000))
        seconds = unit * generator.randint(1, 59)
        return datetime.timedelta(seconds=generator.choice((-1, 1)) * seconds)

    def render_ago(span: datetime.timedelta, language: "Locale") -> str:
        return dates.format_timedelta(span, add_direction=True, locale=language)

    def draw_interval(generator: Random) -> tuple[datetime.date, datetime.date]:
        first = _day(generator)
        return first, first + datetime.timedelta(days=generator.randrange(1, 200))

    def render_interval(days: tuple[datetime.date, datetime.date], language: "Locale") -> str:
        first, last = days
        return dates.format_interval(first, last, "yMMMd", locale=language)

    return [
        date("full"),
        date("long"),
        hour("short"),
        date("medium"),
        fields("MMMMEd"),
        date("short"),
        PhraseKind(draw_span, render_ago),
        hour("medium"),
        fields("yMMMM"),
        PhraseKind(draw_interval, render_interval),
        fields("yQQQQ"),
    ]


def _amounts(languages: "tuple[Locale, Locale]") -> list[PhraseKind]:
    from babel import lists, numbers, units

    def has_words(unit: str) -> bool:  # Babel writes CLDR's code if a language lacks words
        for value, length, language in product((1, 2, 5.5), _LENGTHS, languages):
            if unit in units.format_unit(value, unit, length, locale=language):
                return False
        return True

    measures = [unit for unit in _UNITS if has_words(unit)]

    def draw_quantity(generator: Random) -> tuple[float, str]:
        unit = generator.choice(measures)
        return _number(generator, _UNITS[unit]), unit

    def quantity(length: Length) -> PhraseKind:
        def render(content: tuple[float, str], language: "Locale") -> str:
            value, unit = content
            return units.format_unit(value, unit, length, locale=language)

        return PhraseKind(draw_quantity, render)

    def draw_duration(generator: Random) -> list[tuple[int, str]]:
        amounts = [(generator.randint(1, 59), unit) for unit in _CLOCK]
        return amounts[generator.randrange(2) :][: generator.randint(2, 3)]

    def render_duration(amounts: list[tuple[int, str]], language: "Locale") -> str:
        texts = [units.format_unit(value, unit, locale=language) for value, unit in amounts]
        return lists.format_list(texts, locale=language)

    def draw_price(generator: Random) -> tuple[str, float]:
        return generator.choice(_CURRENCIES), _number(generator)

    def money(style: Literal["name", "standard"]) -> PhraseKind:
        def render(price: tuple[str, float], language: "Locale") -> str:
            currency, value = price
            return numbers.format_currency(value, currency, locale=language, format_type=style)

        return PhraseKind(draw_price, render)

    def draw_long_number(generator: Random) -> int:
        return generator.randint(1, 999) * 10 ** generator.choice((3, 6, 9))

    def render_long_number(value: int, language: "Locale") -> str:
        return numbers.format_compact_decimal(value, format_type="long", locale=language)

    def draw_numbers(generator: Random) -> list[float]:
        return [_number(generator, 9999) for _ in range(generator.randint(2, 4))]

    def render_numbers(values: list[float], language: "Locale") -> str:
        texts = [numbers.format_decimal(value, locale=language) for value in values]
        return lists.format_list(texts, locale=language)

    kinds = []
    if measures:
        kinds += [quantity(length) for length in _LENGTHS]
    if set(_CLOCK) <= set(measures):
        kinds.append(PhraseKind(draw_duration, render_duration))
    kinds += [
        money("name"),
        PhraseKind(draw_numbers, render_numbers),
        money("standard"),
        PhraseKind(draw_long_number, render_long_number),
    ]
    return kinds


def _names(languages: "tuple[Locale, Locale]") -> list[PhraseKind]:
    from babel import lists, numbers

    def common(tables: list[Mapping[str, str]]) -> list[str]:
        """Return the codes for which all tables have a name."""
        codes = []
        for code in tables[0]:
            is_code = len(code) == 2 and code.isalpha()
            if is_code and all(table.get(code, code) != code for table in tables):
                codes.append(code)
        return sorted(codes)

    countries = common([language.territories for language in languages])
    tongues = common([language.languages for language in languages])

    def several(
        codes: list[str],
        table: Literal["territories", "languages"],
        style: Literal["standard", "or"],
    ) -> PhraseKind:
        def draw(generator: Random) -> list[str]:
            return generator.sample(codes, generator.choice((1, 2, 2, 3, 3, 4)))

        def render(chosen: list[str], language: "Locale") -> str:
            names = getattr(language, table)
            return lists.format_list([names[code] for code in chosen], style, locale=language)

        return PhraseKind(draw, render)

    def draw_tongue_of_country(generator: Random) -> tuple[str, str]:
        return generator.choice(tongues), generator.choice(countries)

    def render_tongue_of_country(pair: tuple[str, str], language: "Locale") -> str:
        tongue, country = pair
        return f"{language.languages[tongue]} ({language.territories[country]})"

    def draw_share(generator: Random) -> tuple[float, str]:
        return generator.randint(0, 1000) / 1000, generator.choice(countries)

    def render_share(content: tuple[float, str], language: "Locale") -> str:
        share, country = content
        percent = numbers.format_percent(share, locale=language, decimal_quantization=False)
        return f"{language.territories[country]}: {percent}"

    return [
        several(countries, "territories", "standard"),
        several(tongues, "languages", "standard"),
        several(countries, "territories", "or"),
        PhraseKind(draw_share, render_share),
        several(tongues, "languages", "or"),
        PhraseKind(draw_tongue_of_country, render_tongue_of_country),
    ]

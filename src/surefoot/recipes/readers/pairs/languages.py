"""Names of languages, as header lines of tables and suffixes of files write them."""

import re

from surefoot.errors import ConfigError

# code, codes of three letters, name in English, name of its own; in lower case
_LANGUAGES = """
af afr afrikaans
am amh amharic አማርኛ
ar ara arb arabic العربية
az aze azeri azerbaijani azərbaycan
be bel belarusian беларуская
bg bul bulgarian български
bn ben bengali bangla বাংলা
bs bos bosnian bosanski
ca cat catalan català
cs ces cze czech čeština česky
cy cym wel welsh cymraeg
da dan danish dansk
de deu ger german deutsch
el ell gre greek ελληνικά
en eng english
eo epo esperanto
es spa spanish español castellano
et est estonian eesti
eu eus baq basque euskara
fa fas per persian farsi فارسی
fi fin finnish suomi
fr fra fre french français francais
ga gle irish gaeilge
gl glg galician galego
gu guj gujarati ગુજરાતી
ha hau hausa
he heb hebrew עברית
hi hin hindi हिन्दी
hr hrv croatian hrvatski
hu hun hungarian magyar
hy hye arm armenian հայերեն
id ind indonesian indonesia
ig ibo igbo
is isl ice icelandic íslenska
it ita italian italiano
ja jpn japanese 日本語
ka kat geo georgian ქართული
kk kaz kazakh қазақ
km khm khmer ខ្មែរ
ko kor korean 한국어
la lat latin latina
lt lit lithuanian lietuvių
lv lav latvian latviešu
mk mkd mac macedonian македонски
ml mal malayalam മലയാളം
mn mon mongolian монгол
mr mar marathi मराठी
ms msa may malay melayu
my mya bur burmese မြန်မာ
nb nob bokmål bokmal
ne nep nepali नेपाली
nl nld dut dutch nederlands
nn nno nynorsk
no nor norwegian norsk
pa pan punjabi ਪੰਜਾਬੀ
pl pol polish polski
ps pus pashto پښتو
pt por portuguese português portugues
ro ron rum romanian română romana
ru rus russian русский
si sin sinhala සිංහල
sk slk slo slovak slovenčina
sl slv slovenian slovene slovenščina
so som somali soomaali
sq sqi alb albanian shqip
sr srp serbian српски srpski
sv swe swedish svenska
sw swa swahili kiswahili
ta tam tamil தமிழ்
te tel telugu తెలుగు
th tha thai ไทย
tl tgl tagalog filipino
tr tur turkish türkçe turkce
uk ukr ukrainian українська
ur urd urdu اردو
uz uzb uzbek
vi vie vietnamese tiếng việt
xh xho xhosa
yo yor yoruba yorùbá
zh zho chi cmn chinese mandarin 中文 汉语 漢語
zu zul zulu isizulu
"""
_CODES = dict[str, str]()  # by code or name
for _names in map(str.split, _LANGUAGES.strip().splitlines()):
    _CODES |= dict.fromkeys(_names, _names[0])
_REGION = re.compile(r"([a-z]{2,3})[-_](?:[a-z]{2}|[a-z]{4}|[0-9]{3})", re.ASCII)


def language_code(name: str) -> str | None:
    """Return the code of the language that a code or name stands for, or None.

    >>> language_code("German"), language_code("DEU"), language_code("pt_BR"), language_code("rain")
    ('de', 'de', 'pt', None)
    """
    name = name.strip().casefold()
    region = _REGION.fullmatch(name)
    if region is not None:
        name = region[1]
    return _CODES.get(name)


def of_one_language(name: str) -> ConfigError:
    """Return the error for pairs whose source and target are the same language."""
    return ConfigError(
        "pairs-of-one-language",
        problem=f"source and target are both {name!r}",
        remedy="name two languages, such as en and de",
        setting="source",
        value=name,
    )

"""Write the table of all settings into docs/settings.md anew: python docs/write_settings.py."""

import sys
from pathlib import Path

from surefoot import Run
from surefoot.config.settings_table import with_table

page = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("settings.md")
page.write_text(with_table(page.read_text(), Run))

from .write import write_page

__all__ = ["write_page"]

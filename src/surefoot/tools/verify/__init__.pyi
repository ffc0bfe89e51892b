from .verdict import Verdict as Verdict

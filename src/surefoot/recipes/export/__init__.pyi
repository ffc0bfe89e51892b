from .export import ExportResult as ExportResult

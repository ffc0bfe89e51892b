from .finding import Finding as Finding

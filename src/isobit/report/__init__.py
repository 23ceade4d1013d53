"""Pictures, pages and reports, drawn from records. Never imports torch."""

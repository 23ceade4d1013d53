"""An audit as text, HTML, JSON and SARIF; from records only, without torch."""

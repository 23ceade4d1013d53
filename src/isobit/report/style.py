"""The HTML and style sheet of the page of an audit."""

from isobit.report.markup import FOOTER_STYLE
from isobit.report.svg import STYLE as PICTURES

# The pictures of orders bring classes of their own: quiet, title, panel, bar and others mean what they say there.
STYLE = """
:root{color-scheme:light dark;--ink:#20252d;--soft:#5d6675;--line:#dfe3e9;--ground:#f7f8fa;--card:#fff;
--good:#237a4b;--warn:#a1470c;--mute:#6b7280;--bad:#b3261e;--link:#2f5f98;--mark:#ffd9bd;--share:#d9631e;
--u0:#f6cfae;--u1:#efae7d;--u2:#e48c4d;--u3:#cd6826;--u4:#9c4712;--u5:#612807;--nan:#8a6fb5}
@media (prefers-color-scheme:dark){:root{--ink:#dde1e8;--soft:#a1aab9;--line:#343b47;--ground:#1b1f27;--card:#14171d;
--good:#5cc08a;--warn:#f08a4b;--mute:#9aa3b2;--bad:#f2837b;--link:#8db9ee;--mark:#7a3f1c;--share:#f08a4b;
--u0:#573524;--u1:#7a4624;--u2:#9c5422;--u3:#cc6f30;--u4:#f0995f;--u5:#ffd1b0;--nan:#b79be3}}
body{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;
color:var(--ink);background:var(--card)}
h1{font-size:1.5rem;margin:0 0 .2rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.4rem 0 .5rem}
h3{font-size:.95rem;margin:1.4rem 0 .3rem}a{color:var(--link)}p{margin:.35rem 0}
code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{background:var(--ground);border:1px solid var(--line);border-radius:6px;padding:.5rem .7rem;white-space:pre-wrap}
.soft{color:var(--soft)}p.soft,td.soft,span.soft{font-size:.88rem}
.good{--tone:var(--good)}.warn{--tone:var(--warn)}.mute{--tone:var(--mute)}.bad{--tone:var(--bad)}
.conclusion{font-size:1.15rem;border-left:4px solid var(--tone);background:var(--ground);border-radius:0 8px 8px 0;
padding:.7rem 1rem;margin:1rem 0;overflow-wrap:anywhere}
.conclusions{padding-left:1.1rem;margin:.5rem 0}.conclusions li{margin:.2rem 0;overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin-bottom:.9rem}
th,.nowrap{white-space:nowrap}
td,th{text-align:left;padding:.35rem .9rem .35rem 0;vertical-align:top}tr{border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;font-size:.82rem;vertical-align:bottom}td.name{overflow-wrap:anywhere;min-width:13rem}
.axis-name{min-width:11rem}.reason{overflow-wrap:anywhere}tr:has(+tr>.reason){border-bottom:0}
.figure{white-space:nowrap;font-variant-numeric:tabular-nums}
.chip{display:inline-block;color:var(--tone);border:1px solid currentColor;border-radius:99px;padding:0 .6rem;
font-size:.8rem;line-height:1.4rem;font-weight:600;
background:color-mix(in srgb,var(--tone) 10%,transparent)}
.amount{display:inline-block;width:90px;height:9px;border-radius:3px;background:var(--line);margin-right:.5rem}
.amount i{display:block;height:9px;border-radius:3px;background:var(--share)}
summary{cursor:pointer}
details.operator{border:1px solid var(--line);border-left:4px solid var(--tone);border-radius:8px;
margin:.6rem 0;padding:.5rem .9rem}
details.operator>summary{overflow-wrap:anywhere}details.operator>summary>*{margin-right:.7rem}
.place{scroll-margin-top:5rem;padding-top:.4rem}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:.3rem 0 .8rem}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere;min-width:0}
.bits{width:auto;margin:0}.bits tr{border:0}.bits td{padding:.1rem .9rem .1rem 0}.bits code{overflow-wrap:normal}
mark{background:var(--mark);color:inherit;border-radius:2px;font-weight:700}
.plain{padding-left:1.1rem;overflow-wrap:anywhere}svg{max-width:100%;height:auto}
.scroll{overflow-x:auto;width:fit-content;max-width:100%;box-sizing:border-box;
border:1px solid var(--line);border-radius:8px;background:var(--ground);padding:.4rem}
.strip{max-width:none;vertical-align:middle}
.strip text{font:12px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}
.strip text.tiny{font-size:10px;fill:var(--soft)}
.strip text.soft,.strip .soft{fill:var(--soft);font-size:11px}.strip .rule{stroke:var(--line);stroke-width:1;fill:none}
.strip .wrong{stroke:var(--bad);stroke-width:2.5}.strip .chance{stroke:var(--nan);stroke-width:2.5}
.strip .u0{fill:var(--u0)}.strip .u1{fill:var(--u1)}.strip .u2{fill:var(--u2)}.strip .u3{fill:var(--u3)}
.strip .u4{fill:var(--u4)}.strip .u5{fill:var(--u5)}.strip .nan{fill:var(--nan)}
.strip .open{fill:none;stroke:var(--mute);stroke-width:1.2;stroke-dasharray:2 2}
.strip .ring{fill:none;stroke:var(--ink);stroke-width:1.8;pointer-events:none}
.legend{font-size:.85rem;color:var(--soft);display:flex;flex-wrap:wrap;gap:.2rem .9rem;align-items:center}
.legend span{white-space:nowrap}
@media (max-width:640px){.facts{grid-template-columns:1fr}.facts dd{margin-bottom:.4rem}}
"""

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<h1>{title}</h1><p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>{sentences}
<h2>What differs</h2>{matrix}
{blame}{strips}{operators}
<h2>What was not judged</h2>{unjudged}
{repeat}{origin}
<script type="application/json" id="audit">{json}</script>
</html>
"""


def fill_page(**parts: str) -> str:
    """Return the page; every part is HTML that was escaped before."""
    return PAGE.format(style=PICTURES + STYLE + FOOTER_STYLE, **parts)

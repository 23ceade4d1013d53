"""The HTML and style sheet of the page of contracts."""

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--ink:#20252d;--quiet:#667080;--line:#dfe3e9;--panel:#f7f8fa;--card:#fff;
--good:#237a4b;--warn:#956f00;--mute:#6b7280;--bad:#b3261e;--link:#2f5f98}}
@media (prefers-color-scheme:dark){{:root{{--ink:#dde1e8;--quiet:#98a2b3;--line:#343b47;--panel:#1b1f27;--card:#14171d;
--good:#5cc08a;--warn:#d9b13b;--mute:#9aa3b2;--bad:#f2837b;--link:#8db9ee}}}}
body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1120px;margin:2rem auto;padding:0 1rem;
color:var(--ink);background:var(--card)}}
h1{{font-size:1.5rem;margin:0 0 .8rem}}h2{{font-size:1.1rem;margin:2.2rem 0 .6rem}}
h3{{font-size:.8rem;margin:1.4rem 0 .4rem;color:var(--quiet);text-transform:uppercase;letter-spacing:.06em}}
a{{color:var(--link);text-decoration:none}}a:hover{{text-decoration:underline}}p{{margin:.3rem 0}}
.numbers{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.6rem;margin:0}}
.numbers div{{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:.6rem .8rem}}
.numbers dt{{color:var(--quiet);font-size:.82rem}}.numbers dd{{margin:0;font-size:1.1rem;font-weight:600}}
.numbers small{{font-weight:400;color:var(--quiet);font-size:.85rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.4rem .7rem .4rem 0;vertical-align:middle}}
tr{{border-bottom:1px solid var(--line)}}th{{color:var(--quiet);font-weight:500;font-size:.82rem}}
.good{{--tone:var(--good)}}.warn{{--tone:var(--warn)}}.mute{{--tone:var(--mute)}}.bad{{--tone:var(--bad)}}
.chip{{display:inline-block;color:var(--tone);border:1px solid currentColor;border-radius:99px;padding:0 .6rem;
font-size:.8rem;line-height:1.45rem;font-weight:600;white-space:nowrap;
background:color-mix(in srgb,var(--tone) 10%,transparent)}}
.rungs{{display:inline-flex;gap:3px;vertical-align:middle}}
.rungs i{{font:600 .7rem/1.35rem ui-sans-serif,system-ui,sans-serif;width:2.1rem;text-align:center;border-radius:4px;
color:var(--quiet);background:var(--panel);box-shadow:inset 0 0 0 1px var(--line)}}
.rungs .full{{background:var(--tone);color:var(--card);box-shadow:none}}
.rungs .required{{outline:2px solid var(--ink);outline-offset:1px}}
.quiet{{color:var(--quiet);font-size:.88rem}}
.graph{{overflow:auto;border:1px solid var(--line);border-radius:8px;background:var(--panel);text-align:center}}
.graph rect{{fill:var(--card)}}.graph text:not([fill]){{fill:var(--ink)}}
details.contract{{border:1px solid var(--line);border-left:4px solid var(--tone);border-radius:8px;margin:.7rem 0;
padding:.6rem 1rem}}
summary{{cursor:pointer}}details.contract>summary{{display:flex;gap:.8rem;align-items:center;flex-wrap:wrap}}
summary b{{font-size:1.02rem}}summary span.quiet{{flex:1 1 16rem}}
.place{{scroll-margin-top:5rem;padding-top:.5rem;overflow-wrap:anywhere}}
code,pre,.formula{{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}}
.formula{{background:var(--panel);border-radius:6px;padding:.4rem .7rem;margin:.3rem 0;overflow-wrap:anywhere}}
.obligation{{margin:1.1rem 0 .4rem}}
.claim{{border:1px solid var(--line);border-left:3px solid var(--tone);border-radius:6px;padding:.5rem .8rem;
margin:.5rem 0 .5rem .8rem}}
.claim header{{display:flex;gap:.7rem;align-items:center;flex-wrap:wrap}}.claim header code{{color:var(--quiet)}}
.claim p,.claim ul{{margin:.35rem 0;overflow-wrap:anywhere}}ul{{padding-left:1.1rem}}
.claim details{{margin:.35rem 0}}.tone{{color:var(--tone);font-weight:600}}
pre{{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:.5rem .7rem;margin:.35rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}}
.wide{{overflow-x:auto}}{footer_style}
</style>
<h1>{title}</h1>{numbers}
<h2>The ladder</h2>{ladder}
<h2>Dependencies</h2><div class="graph">{graph}</div>
<h2>Contracts</h2>{contracts}{origin}
</html>
"""

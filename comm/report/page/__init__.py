"""report.html: one page for a run that needs nothing but itself.

result      reads run.json and traffic.npz            unfinished  reads events.rank<r>.jsonl instead
sections    verdicts, headline, full size, manifest   figures     the charts
heat, png   rank x rank                               charts      matplotlib made part of the page
html        escapes all texts                         document    puts the page together
"""

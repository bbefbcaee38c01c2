"""What a run leaves behind: its record on disk and the page that a person reads.

units        numbers to words, the only place where a byte becomes a kB
tally        counted bytes by link tier beside their predictions (pure)
load         bandwidths and balance (pure)
record       counted arrays and predictions -> the run.json dictionary (pure)
full_scale   the same routing carried to the unscaled model (pure)
events       a line for each layer and phase as it happens
store        that dictionary and the arrays -> files, each whole or not at all
layout       lines, tables and wrapping, plain ASCII
table_rows   which layers are shown, which are summed (pure)
layer_table  the table by layer and phase
answer       what ran, the verdicts, where the files are
figures      notes on the table, headline, full size, time
console      the page of all these, from the run.json dictionary alone
progress     a bar on rank 0's terminal

reading         a finished result as an object: sums, matrices, verdicts
replay          matrices for alltoallv_perf of nccl-tests
trace_events    phases by rank over time, for Perfetto
cells           the non-zero cells in CSV and Parquet
compare         two records held against each other (pure); compare_page: as text
sweep_figures   what a sweep compares of a run (pure)
sweep_page      a sweep as text and as CSV; sweep_html: as a page; curves: its figure
"""

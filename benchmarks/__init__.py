"""What position encodings cost, measured: every claim about speed and memory is a row here.

    python -m benchmarks                      all rows (about 25 minutes on 2 cores), a table, results.json, growth.png
    python -m benchmarks alibi_forward growth some of them
    python -m benchmarks --list               their names

Times are medians of interleaved rounds: every variant runs once, then every variant again, so that whatever else the
machine does falls on all of them. Memory is how far a process of its own grows beyond what it held before.
"""

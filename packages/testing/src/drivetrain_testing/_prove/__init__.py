"""``drivetrain prove``: runs a job undisturbed and with kills, compares the two, and names the cause of a difference.

Modules, from the bottom to the top:

- in the workers of the job: ``digests``, ``probe`` (what the process holds), ``observer`` (what it reads and reports);
- reading: ``events`` (of the observers), ``contents`` (of checkpoints);
- running: ``kills`` (when to kill what), ``paused`` and ``drivers`` (the processes of the script, which start ahead of
  time), ``nodes`` (of a Ray cluster), ``job`` (one run of the job, with kills and new starts);
- judging: ``comparing``, ``causes``, ``diagnosis``;
- ``proof`` puts them together, and ``command`` is the command line.
"""

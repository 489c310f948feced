"""Bytes and rows that outlive every process: one SQLite database and append-only packs. It decides nothing.

* ``store`` – transactions on both; ``tables/`` – the SQL, a file for each table; ``schema.sql`` – version 1
* ``write_lock`` – one process writes at a time, and a frozen one is found; ``group_commit`` – threads share a commit
* ``payload_store`` – payloads and screenshots; ``pack_writer`` and ``pack_reader`` – the packs they lie in
* ``retention`` – purges what was delivered long ago; ``disk_reserve`` – room for acknowledgements on a full disk
* ``data_dir`` – whose directory it is; ``shared_clock`` – one time for all its processes
* ``storage_errors`` – what the database and the disk say, as our errors
"""

"""Durable storage: one SQLite database and append-only pack files. Rules on the data are in ``state/``.

* ``store`` – transactions on both; ``tables/`` – the SQL, a file for each table
* ``schema.sql`` – version 1 of the tables; ``migrations`` – creates the database and brings it to a later version
* ``write_lock`` – one process writes at a time; detects a frozen holder; ``group_commit`` – threads share a commit, and
  ``write_batcher`` – the requests of an event loop
* ``payload_store`` – payloads and screenshots; ``pack_writer`` and ``pack_reader`` – the pack files
* ``retention`` – purges payloads delivered long ago; ``disk_reserve`` – space for acknowledgements on a full disk
* ``data_dir`` – ownership and permissions of the data directory; ``shared_clock`` – one clock for all its processes
* ``storage_errors`` – translates errors of the database and the disk
"""

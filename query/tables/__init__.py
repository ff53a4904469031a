"""The tables of a lake in SQL, on a connection that can read nothing else."""

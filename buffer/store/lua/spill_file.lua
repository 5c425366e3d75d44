-- Registers a spill file before it is written. args: file (its name). The service removes registered files only: another
-- ledger, or an earlier state of this one, may refer to those that Redis does not know (spill.py).
redis.call('SADD', key('spill_files'), args.file)

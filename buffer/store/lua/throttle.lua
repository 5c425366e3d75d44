-- Training can't bear the configured staleness at present, or can again. args: max_staleness (the bound of issue.lua where it
-- is the smaller one). What is in flight or ready stays: lease.lua judges it by the configured bound.
redis.call('HSET', key('meta'), 'throttle', args.max_staleness)

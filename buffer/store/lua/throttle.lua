-- Lowers the staleness that tickets are issued for, or restores it. args: max_staleness (issue.lua uses the smaller of
-- this and the configured bound). Groups in flight or ready are not affected: lease.lua uses the configured bound.
redis.call('HSET', key('meta'), 'throttle', args.max_staleness)

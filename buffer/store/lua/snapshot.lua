-- Counters and latest versions of the run. args: reports (number of finished evaluations to list).
-- Returns {counters as name, value, ...}, in flight, ready, leased, trained, version, {versions evaluated last}, the
-- version whose evaluation was requested last (nil: none), its slices that are not granted, groups in spill files.
local evaluating = redis.call('HGET', key('meta'), 'evaluated')
return {
  redis.call('HGETALL', key('counters')),
  redis.call('ZCARD', key('issued')),
  redis.call('ZCARD', key('ready')),
  redis.call('ZCARD', key('leased')),
  redis.call('ZCARD', key('trained')),
  tonumber(redis.call('HGET', key('meta'), 'version') or 0),
  redis.call('LRANGE', key('eval_reports'), -args.reports, -1),
  evaluating,
  redis.call('LLEN', key('eval_todo:' .. (evaluating or ''))),
  redis.call('HLEN', key('spilled')),
}

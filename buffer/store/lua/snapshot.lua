-- How the run stands, in one look. args: reports (how many finished evaluations to name).
-- Returns {counters as name, value, ...}, in flight, ready, leased, trained, version, {versions evaluated last}, the version
-- whose evaluation was asked for last (nil: none), slices of it that are to be handed out.
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
}

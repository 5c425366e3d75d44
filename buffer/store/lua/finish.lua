-- The run is over: nothing more is issued, leased -> ready, issued -> expired. Returns how many expired.
redis.call('HSET', key('meta'), 'finished', 1)
end_leases('the run finished')
local ids = redis.call('ZRANGE', key('issued'), 0, -1)
for _, id in ipairs(ids) do
  land(id)
  drop(id, 'expired', 'run_finished')
end
return #ids

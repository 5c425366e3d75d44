-- Ends the run: no more tickets, leased -> ready, issued -> expired. Returns the number of expired groups.
redis.call('HSET', key('meta'), 'finished', 1)
end_leases('the run finished')
local ids = redis.call('ZRANGE', key('issued'), 0, -1)
for _, id in ipairs(ids) do
  release_ticket(id)
  drop(id, 'expired', 'run_finished')
end
for _, place in ipairs(redis.call('LRANGE', key('resume'), 0, -1)) do
  redis.call('DEL', key('events:' .. place:match('^%d+:%d+:(.+)$')))
end
for _, server in ipairs(redis.call('ZRANGE', key('heard'), 0, -1)) do write_off(server, 'run_finished') end
return #ids

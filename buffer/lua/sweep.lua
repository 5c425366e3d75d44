-- Deadlines: issued -> reissued (its task will be issued again under a new ticket), leased -> ready.
-- Returns {tickets that ran out, leases that ran out}.
local late = now()
local tickets = redis.call('ZRANGEBYSCORE', key('issued'), '-inf', late)
for _, id in ipairs(tickets) do
  local task = redis.call('HMGET', key('ticket:' .. id), 'epoch', 'position')
  land(id)
  redis.call('RPUSH', key('reissue'), task[1] .. ':' .. task[2])
  count('reissued', 1)
end
local leases = redis.call('ZRANGEBYSCORE', key('leased'), '-inf', late)
for _, id in ipairs(leases) do
  redis.call('ZREM', key('leased'), id)
  redis.call('ZADD', key('ready'), id, id)
end
return {#tickets, #leases}

-- Deadlines: issued -> reissued (its task will be issued again under a new ticket), leased -> ready, and whatever a silent
-- server holds comes back. ARGV: how long a server may be silent in s; negative: nobody is judged silent. Then servers that
-- the service has heard, if not their heartbeat, and for how long it has not in s, in turn.
-- Returns {tickets reissued, leased groups back, slices of an evaluation back, silent servers ...}.
local time, silent_s = now(), tonumber(ARGV[1])
local tickets, slices = 0, 0
local swept = {0, 0, 0}
if silent_s >= 0 then
  -- A clock that was set back must not make a dead server look alive until it has caught up.
  for _, server in ipairs(redis.call('ZRANGEBYSCORE', key('heard'), '(' .. stamp(), '+inf')) do
    redis.call('ZADD', key('heard'), time, server)
  end
  for i = 2, #ARGV, 2 do redis.call('ZADD', key('heard'), 'XX', 'GT', time - ARGV[i + 1], ARGV[i]) end
  for _, server in ipairs(redis.call('ZRANGEBYSCORE', key('heard'), '-inf', time - silent_s)) do
    local its_tickets, its_slices = dismiss(server, 'silent server ' .. server)
    tickets, slices = tickets + its_tickets, slices + its_slices
    swept[#swept + 1] = server
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('issued'), '-inf', time)) do
  reissue(id, 'ticket deadline')
  tickets = tickets + 1
end
local leases = redis.call('ZRANGEBYSCORE', key('leased'), '-inf', time)
for _, id in ipairs(leases) do back_to_ready(id, 'lease deadline') end
local version = redis.call('HGET', key('meta'), 'evaluated')
if version then
  for _, slice in ipairs(redis.call('ZRANGEBYSCORE', key('eval_issued:' .. version), '-inf', time)) do
    return_slice(version, slice)
    slices = slices + 1
  end
end
swept[1], swept[2], swept[3] = tickets, #leases, slices
return swept

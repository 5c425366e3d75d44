-- Applies the deadlines: issued -> reissued, leased -> ready, and everything that a silent server holds is available
-- again.
-- args: silent_s (allowed silence of a server; negative: no check), silences_s (by server: seconds since its last
-- message of any kind, which may be later than its last heartbeat).
-- Returns {tickets reissued, leased groups returned, slices of an evaluation returned, silent servers ...}.
local time, silent_s = now(), args.silent_s
local tickets, slices = 0, 0
local swept = {0, 0, 0}
if silent_s >= 0 then
  -- After the clock was set back, a dead server must not count as alive until the clock has caught up.
  for _, server in ipairs(redis.call('ZRANGEBYSCORE', key('heard'), '(' .. timestamp(), '+inf')) do
    redis.call('ZADD', key('heard'), time, server)
  end
  for server, silence_s in pairs(args.silences_s) do
    redis.call('ZADD', key('heard'), 'XX', 'GT', time - silence_s, server)
  end
  for _, server in ipairs(redis.call('ZRANGEBYSCORE', key('heard'), '-inf', time - silent_s)) do
    local tickets_of_it, slices_of_it = remove_server(server, 'silent server ' .. server, 'server_lost')
    tickets, slices = tickets + tickets_of_it, slices + slices_of_it
    swept[#swept + 1] = server
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('issued'), '-inf', time)) do
  reissue(id, 'ticket deadline')
  tickets = tickets + 1
end
local leases = redis.call('ZRANGEBYSCORE', key('leased'), '-inf', time)
for _, id in ipairs(leases) do return_to_ready(id, 'lease deadline') end
local version = redis.call('HGET', key('meta'), 'evaluated')
if version then
  for _, slice in ipairs(redis.call('ZRANGEBYSCORE', key('eval_issued:' .. version), '-inf', time)) do
    return_slice(version, slice)
    slices = slices + 1
  end
end
swept[1], swept[2], swept[3] = tickets, #leases, slices
return swept

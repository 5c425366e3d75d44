-- Deadlines: issued -> reissued (its task will be issued again under a new ticket), leased -> ready, and whatever a silent
-- server holds comes back. args: silent_s (how long a server may be silent; negative: nobody is judged silent),
-- silences_s (by server: for how long it has sent nothing to the service, which hears more than heartbeats).
-- Returns {tickets reissued, leased groups back, slices of an evaluation back, silent servers ...}.
local time, silent_s = now(), args.silent_s
local tickets, slices = 0, 0
local swept = {0, 0, 0}
if silent_s >= 0 then
  -- A clock that was set back must not make a dead server look alive until it has caught up.
  for _, server in ipairs(redis.call('ZRANGEBYSCORE', key('heard'), '(' .. stamp(), '+inf')) do
    redis.call('ZADD', key('heard'), time, server)
  end
  for server, silence_s in pairs(args.silences_s) do
    redis.call('ZADD', key('heard'), 'XX', 'GT', time - silence_s, server)
  end
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

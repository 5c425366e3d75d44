-- A server is alive. args: server, grace_s, held (ids of its tickets). What it was given longer ago than the grace and doesn't
-- hold was lost on the way: the tasks are issued again. What it holds although it was issued again, as after a silence, it
-- may be busy with: it is charged for it. Returns how many tickets and slices of an evaluation were lost.
local server, time = args.server, now()
local until_then = time - args.grace_s
redis.call('ZADD', key('heard'), time, server)
local held, charged = {}, {}
for _, id in ipairs(args.held) do held[id] = true end
local lost = 0
for _, id in ipairs(redis.call('SMEMBERS', key('tickets_of:' .. server))) do
  charged[id] = true
  if not held[id] then
    local known = redis.call('HMGET', key('about:' .. id), 'state', 'issued_at')
    local issued_at = tonumber(known[2])
    if known[1] ~= 'issued' then  -- it was issued again meanwhile
      redis.call('SREM', key('tickets_of:' .. server), id)
    elseif issued_at > time then  -- the clock was set back
      redis.call('HSET', key('about:' .. id), 'issued_at', stamp())
    elseif issued_at < until_then then
      land(id)
      reissue(id, 'lost on the way to ' .. server)
      lost = lost + 1
    end
  end
end
for id in pairs(held) do
  if not charged[id] and state_of(id) == 'reissued' and about(id, 'server') == server then
    redis.call('SADD', key('tickets_of:' .. server), id)
  end
end
local version, slices = slices_of(server)
for _, slice in ipairs(slices) do
  local since = tonumber(redis.call('HGET', key('eval_since:' .. version), slice))
  if since > time then  -- as above
    redis.call('HSET', key('eval_since:' .. version), slice, stamp())
  elseif not held[slice_ticket(version, slice)] and since < until_then then
    return_slice(version, slice)
    lost = lost + 1
  end
end
return lost

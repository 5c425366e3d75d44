-- Records that servers are alive. args: grace_s, held (by server: ids of the tickets it holds). A ticket issued before the
-- grace that its server does not hold was lost on the way: its task is issued again. A reissued ticket that the server
-- still holds, such as after a silence, keeps occupying one of its credits. sampled: by server, its tokens of these tickets
-- so far (report_tokens).
-- Returns {server, number of its lost tickets and slices of an evaluation, ...}, where there are any.
local time = now()
local grace_start = time - args.grace_s

local function heartbeat(server, listed)
  redis.call('ZADD', key('heard'), time, server)
  report_tokens(server, args.sampled[server] or {})
  local held, occupying = {}, {}
  for _, id in ipairs(listed) do held[id] = true end
  local lost = 0
  for _, id in ipairs(redis.call('SMEMBERS', key('tickets_of:' .. server))) do
    occupying[id] = true
    if not held[id] then
      local known = redis.call('HMGET', key('about:' .. id), 'state', 'issued_at')
      local issued_at = tonumber(known[2])
      if known[1] ~= 'issued' then  -- reissued in the meantime
        redis.call('SREM', key('tickets_of:' .. server), id)
        forget_unsettled(server, id)
      elseif issued_at > time then  -- the clock was set back
        redis.call('HSET', key('about:' .. id), 'issued_at', timestamp())
      elseif issued_at < grace_start then
        release_ticket(id)
        reissue(id, 'lost on the way to ' .. server, 'redis_lost')
        forget_unsettled(server, id)
        lost = lost + 1
      end
    end
  end
  for id in pairs(held) do
    if not occupying[id] and state_of(id) == 'reissued' and field_of(id, 'server') == server then
      redis.call('SADD', key('tickets_of:' .. server), id)
    end
  end
  local version, slices = slices_of(server)
  for _, slice in ipairs(slices) do
    local since = tonumber(redis.call('HGET', key('eval_since:' .. version), slice))
    if since > time then  -- as above
      redis.call('HSET', key('eval_since:' .. version), slice, timestamp())
    elseif not held[slice_ticket(version, slice)] and since < grace_start then
      forget_unsettled(server, slice_ticket(version, slice))
      return_slice(version, slice)
      lost = lost + 1
    end
  end
  return lost
end

local found = {}
for server, listed in pairs(args.held) do
  local lost = heartbeat(server, listed)
  if lost > 0 then
    found[#found + 1] = server
    found[#found + 1] = lost
  end
end
return found

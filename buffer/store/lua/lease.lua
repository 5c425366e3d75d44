-- ready -> leased, all `count` groups or none, in the sampler's order; groups that are too stale -> expired.
-- args: step, consuming_version, count, deadline_s, min_diff, min_ready (groups that must arrive before the first lease),
-- spill_bytes, and those of `capacity`.
-- Returns {id, weight, exposure, ...}, empty while there are too few groups. A group of weight w was drawn with probability
-- 1 - exp(-exposure); exposure = w * (threshold - position of the race), 'inf' where nothing was left to draw (sampling.py).
-- Returns {'spilled', ids} where the bytes of these groups must be read back from spill files first (spill.py).
-- A repeated request for a step gets the same lease: the first answer may have been lost.
local step, wanted = args.step, args.count
local deadline = now() + args.deadline_s
-- A late repetition must not hold groups for a step that is done.
if step < tonumber(redis.call('HGET', key('meta'), 'next_step') or 0) then return {} end
local per_insert = args.samples_per_insert

-- A lease that expired while its learner is alive is renewed: its groups must not be leased for another step.
-- Groups with a lease are leased or, after its expiry, ready: if all are leased there is nothing to renew.
local leases, assigned = redis.call('ZRANGE', key('leases'), 0, -1), 0
for _, of_step in ipairs(leases) do assigned = assigned + redis.call('ZCARD', key('lease:' .. of_step)) end
if assigned > redis.call('ZCARD', key('leased')) then
  for _, of_step in ipairs(leases) do
    for _, id in ipairs(redis.call('ZRANGE', key('lease:' .. of_step), 0, -1)) do
      if state_of(id) == 'ready' then enter_state(id, 'leased', deadline, 'renewed for step ' .. of_step) end
    end
  end
end

local oldest_allowed = args.consuming_version - args.max_staleness
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('by_version'), '-inf', '(' .. oldest_allowed)) do
  end_uses(id, 'too_stale', 'too stale')
end

local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
if #ids == 0 then
  if redis.call('ZCARD', key('ready')) < wanted then return {} end
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py. It applies only while more groups can arrive.
  if redis.call('ZCARD', key('issued')) > 0 or capacity() > 0 then
    local _, samples = rate_counts()
    local inserted = redis.call('HMGET', key('meta'), 'arrived', 'inserts')
    local arrived, inserts = tonumber(inserted[1] or 0), tonumber(inserted[2] or 0)
    if arrived < args.min_ready then return {} end
    if per_insert > 0 and inserts * per_insert - samples - wanted < args.min_diff - ROUNDING then return {} end
  end
  local found = redis.call('ZRANGE', key('ready'), 0, wanted, 'WITHSCORES')
  if redis.call('HLEN', key('spilled')) > 0 then
    local spilled = {}
    for place = 1, wanted do
      local id = found[2 * place - 1]
      if redis.call('HEXISTS', key('spilled'), id) == 1 then spilled[#spilled + 1] = id end
    end
    if #spilled > 0 then return {'spilled', spilled} end
  end
  -- The lowest key that is not drawn.
  local threshold = tonumber(found[2 * wanted + 2] or math.huge)
  local position = tonumber(redis.call('HGET', key('meta'), 'race') or 0)
  local raced_up_to, groups, places = position, {}, {}
  for place = 1, wanted do
    local id, order = found[2 * place - 1], tonumber(found[2 * place])
    local raced, weight = unpack(redis.call('HMGET', key('about:' .. id), 'raced', 'weight'))
    local facts
    -- A group whose lease was returned has a key that the race has passed: its draw was that of the earlier lease.
    if raced == '1' and order > position then
      raced_up_to = order
      facts = {'exposure', string.format('%.17g', tonumber(weight) * (threshold - position))}
    end
    ids[place] = id
    groups[place] = {id = id, before = 'ready', score = deadline, detail = 'for step ' .. step, facts = facts}
    places[2 * place - 1], places[2 * place] = place, id
  end
  -- Later arrivals start here (sampling.py).
  if raced_up_to > position then redis.call('HSET', key('meta'), 'race', string.format('%.17g', raced_up_to)) end
  enter_state_all('leased', groups)
  call_with('ZADD', key('lease:' .. step), places)
  redis.call('ZADD', key('leases'), step, step)
end
local granted = {}
for _, id in ipairs(ids) do
  local drawn = redis.call('HMGET', key('about:' .. id), 'weight', 'exposure')
  granted[#granted + 1] = id
  granted[#granted + 1] = drawn[1]
  granted[#granted + 1] = drawn[2] or 'inf'
end
return granted

-- ready -> leased, all `count` groups or none, in the sampler's order; groups that are too stale -> expired. A step that a
-- restart has undone gets the same groups again, which leads to the weights of the versions that were undone: so all groups
-- are as stale at their step as they would have been without the restart (depth_of).
-- args: step, consuming_version, count, deadline_s, min_diff, min_ready (groups that must arrive before the first lease),
-- spill_bytes, and those of `capacity`.
-- Returns {staleness, id, weight, exposure, ...}, empty while there are too few groups. `staleness` is {version, of its
-- tokens, of those of the next version, ...}, for all versions that the groups may have tokens of. A group of weight w was drawn with probability
-- 1 - exp(-exposure); exposure = w * (threshold - position of the race), 'inf' where nothing was left to draw (sampling.py).
-- Returns {'spilled', ids} where the bytes of these groups must be read back from spill files first (spill.py).
-- A repeated request for a step gets the same lease: the first answer may have been lost.
local step, wanted = args.step, args.count
local deadline = now() + args.deadline_s
-- A late repetition must not hold groups for a step that is done.
local meta = redis.call('HMGET', key('meta'), 'next_step', 'repeat_until')
if step < tonumber(meta[1] or 0) then return {} end
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

local depth = depth_of(args.consuming_version)
local function expire_stale()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('by_version'), '-inf', '(' .. depth - args.max_staleness)) do
    end_uses(id, 'too_stale', 'too stale')
  end
end

-- The groups of an undone step with their scores, as those of `ready`; nil if it can't be repeated. Also returns true if one is
-- still leased for the step before.
local function undone_groups()
  local found, waits = redis.call('ZRANGE', key('undone:' .. step), 0, -1, 'WITHSCORES'), false
  if #found ~= 2 * wanted then return nil end
  for i = 1, #found, 2 do
    local state = state_of(found[i])
    if state ~= 'ready' and state ~= 'leased' then return nil end
    waits = waits or state == 'leased'
  end
  return found, waits
end

-- Steps from here on are not repeated: versions of the same branch that were undone are not those of this training any more.
local function leave_undone_branches(until_step)
  for undone = step, until_step - 1 do redis.call('DEL', key('undone:' .. undone)) end
  redis.call('HDEL', key('meta'), 'repeat_until')
  for i = 1, #branches - 1 do branches[i].shared = math.min(branches[i].shared or depth, depth) end
  set_branches()
  for _, id in ipairs(redis.call('ZRANGE', key('by_version'), 0, -1)) do
    local known = redis.call('HMGET', key('about:' .. id), 'oldest', 'newest')
    redis.call('ZADD', key('by_version'), group_depth(known[1], known[2] or known[1]), id)
  end
end

expire_stale()
local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
if #ids == 0 then
  local again, waits
  local until_step = tonumber(meta[2] or 0)
  if step < until_step then
    again, waits = undone_groups()
    if waits then return {} end
    if not again then
      leave_undone_branches(until_step)
      expire_stale()
    end
  end
  if redis.call('ZCARD', key('ready')) < wanted then return {} end
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py. It applies only while more groups can arrive.
  if not again and (redis.call('ZCARD', key('issued')) > 0 or capacity() > 0) then
    local _, samples = rate_counts()
    local inserted = redis.call('HMGET', key('meta'), 'arrived', 'inserts')
    local arrived, inserts = tonumber(inserted[1] or 0), tonumber(inserted[2] or 0)
    if arrived < args.min_ready then return {} end
    if per_insert > 0 and inserts * per_insert - samples - wanted < args.min_diff - ROUNDING then return {} end
  end
  local found = again or redis.call('ZRANGE', key('ready'), 0, wanted, 'WITHSCORES')
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
    if raced == '1' and order > position and not again then
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
local granted, oldest, newest = {{}}, math.huge, 0
for _, id in ipairs(ids) do
  local known = redis.call('HMGET', key('about:' .. id), 'weight', 'exposure', 'oldest', 'newest')
  granted[#granted + 1] = id
  granted[#granted + 1] = known[1]
  granted[#granted + 1] = known[2] or 'inf'
  oldest = math.min(oldest, tonumber(known[3]))
  newest = math.max(newest, tonumber(known[4] or args.consuming_version))
end
granted[1][1] = oldest
for version = oldest, newest do granted[1][version - oldest + 2] = math.max(0, depth - depth_of(version)) end
return granted

-- ready -> leased, all `count` groups or none, in the sampler's order; groups that are too stale -> expired.
-- args: step, consuming_version, count, max_staleness, deadline_s, groups_per_version, samples_per_insert (0: no rate
-- limit), min_diff, min_ready (groups that must arrive before the first lease).
-- Returns {id, weight, ...}, empty while there are too few groups.
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
  local last = redis.call('ZSCORE', key('used'), id)
  count_rate(-1, -tonumber(field_of(id, 'uses') or 0))
  if last then
    redis.call('ZREM', key('used'), id)
    enter_state(id, 'trained', last, 'no further use: too stale')
  else
    drop(id, 'expired', 'too_stale')
    drop_answers('too_stale', cjson.decode(field_of(id, 'lengths')))
  end
end

local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
if #ids == 0 then
  if redis.call('ZCARD', key('ready')) < wanted then return {} end
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py. It applies only while more groups can arrive.
  if redis.call('ZCARD', key('issued')) > 0 or capacity(args.max_staleness, args.groups_per_version) > 0 then
    local _, samples = rate_counts()
    local inserted = redis.call('HMGET', key('meta'), 'arrived', 'inserts')
    local arrived, inserts = tonumber(inserted[1] or 0), tonumber(inserted[2] or 0)
    if arrived < args.min_ready then return {} end
    if per_insert > 0 and inserts * per_insert - samples - wanted < args.min_diff - ROUNDING then return {} end
  end
  ids = redis.call('ZRANGE', key('ready'), 0, wanted - 1)
  local last = ids[#ids]
  -- The clock of the race (sampling.py): later arrivals start at the key of the last group drawn. A group whose lease
  -- was returned may have an older key.
  if last and field_of(last, 'raced') == '1' then
    local race, order = redis.call('HGET', key('meta'), 'race'), field_of(last, 'order')
    if tonumber(order) > tonumber(race or 0) then redis.call('HSET', key('meta'), 'race', order) end
  end
  local groups, places = {}, {}
  for place, id in ipairs(ids) do
    groups[place] = {id = id, before = 'ready', score = deadline, detail = 'for step ' .. step}
    places[2 * place - 1], places[2 * place] = place, id
  end
  enter_state_all('leased', groups)
  call_with('ZADD', key('lease:' .. step), places)
  redis.call('ZADD', key('leases'), step, step)
end
local granted = {}
for _, id in ipairs(ids) do
  granted[#granted + 1] = id
  granted[#granted + 1] = field_of(id, 'weight')
end
return granted

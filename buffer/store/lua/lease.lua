-- ready -> leased, all or nothing, in the sampler's order; what is too stale on the way -> expired.
-- args: step, consuming_version, count, max_staleness, deadline_s, groups_per_version, samples_per_insert (0: no rate
-- limit), min_diff, min_ready (groups that have to arrive before the first lease).
-- Returns {id, weight, ...}, empty when there is nothing to lease yet.
-- Asked again for the same step it returns the same lease: the first answer may have been lost.
local step, wanted = args.step, args.count
local deadline = now() + args.deadline_s
-- A request that arrives again, late, must not hold groups for a step that is over.
if step < tonumber(redis.call('HGET', key('meta'), 'next_step') or 0) then return {} end
local per_insert = args.samples_per_insert

-- A lease that ran out while its learner lives is still owed a training step: the groups must not go to another one.
-- Whatever is owed is leased or, then, ready: if as many are leased as are owed there is none to look for.
local leases, owed = redis.call('ZRANGE', key('leases'), 0, -1), 0
for _, of_step in ipairs(leases) do owed = owed + redis.call('ZCARD', key('lease:' .. of_step)) end
if owed > redis.call('ZCARD', key('leased')) then
  for _, of_step in ipairs(leases) do
    for _, id in ipairs(redis.call('ZRANGE', key('lease:' .. of_step), 0, -1)) do
      if state_of(id) == 'ready' then enter(id, 'leased', deadline, 'again for step ' .. of_step) end
    end
  end
end

local oldest_allowed = args.consuming_version - args.max_staleness
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('by_version'), '-inf', '(' .. oldest_allowed)) do
  local last = redis.call('ZSCORE', key('used'), id)
  limiter(-1, -tonumber(about(id, 'uses') or 0))
  if last then
    redis.call('ZREM', key('used'), id)
    enter(id, 'trained', last, 'no further use: too stale')
  else
    drop(id, 'expired', 'too_stale')
    drop_answers('too_stale', cjson.decode(about(id, 'lengths')))
  end
end

local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
if #ids == 0 then
  if redis.call('ZCARD', key('ready')) < wanted then return {} end
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py. What can't come is not waited for.
  if redis.call('ZCARD', key('issued')) > 0 or room(args.max_staleness, args.groups_per_version) > 0 then
    local _, samples = rate()
    local counted = redis.call('HMGET', key('meta'), 'arrived', 'inserts')
    local arrived, inserts = tonumber(counted[1] or 0), tonumber(counted[2] or 0)
    if arrived < args.min_ready then return {} end
    if per_insert > 0 and inserts * per_insert - samples - wanted < args.min_diff - ROUNDING then return {} end
  end
  ids = redis.call('ZRANGE', key('ready'), 0, wanted - 1)
  local last = ids[#ids]
  -- The clock of the race (sampling.py): who arrives from now on starts where the last winner came in. A group that came
  -- back may have won long ago.
  if last and about(last, 'raced') == '1' then
    local race, order = redis.call('HGET', key('meta'), 'race'), about(last, 'order')
    if tonumber(order) > tonumber(race or 0) then redis.call('HSET', key('meta'), 'race', order) end
  end
  local groups, places = {}, {}
  for place, id in ipairs(ids) do
    groups[place] = {id = id, before = 'ready', score = deadline, detail = 'for step ' .. step}
    places[2 * place - 1], places[2 * place] = place, id
  end
  enter_all('leased', groups)
  call_with('ZADD', key('lease:' .. step), places)
  redis.call('ZADD', key('leases'), step, step)
end
local granted = {}
for _, id in ipairs(ids) do
  granted[#granted + 1] = id
  granted[#granted + 1] = about(id, 'weight')
end
return granted

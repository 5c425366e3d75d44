-- leased -> trained, for all groups of a step; with uses left: -> ready. What is still leased for an earlier step was trained
-- too: its learner was answered before it went on, and Redis has lost that since. ARGV: step (0-based), uses that a group
-- may have, seed. Returns how many groups.
math.randomseed(tonumber(ARGV[3]))
local race
local over, again, used, used_again = {}, {}, {}, {}

local function settle(id, step)
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'lengths', 'uses', 'raced', 'weight', 'order', 'oldest')
  local uses, order = tonumber(known[3] or 0) + 1, known[6]
  redis.call('RPUSH', key('steps:' .. id), step)
  add_lengths('trained', cjson.decode(known[2]), 1)
  limiter(0, 1)
  if uses < tonumber(ARGV[2]) then
    if known[4] == '1' then
      -- It enters the race anew, as an arrival does (sampling.py).
      race = race or tonumber(redis.call('HGET', key('meta'), 'race') or 0)
      order = string.format('%.17g', race - math.log(1 - math.random()) / tonumber(known[5]))
    end
    used_again[#used_again + 1] = step
    used_again[#used_again + 1] = id
    again[#again + 1] = {
      id = id, before = known[1], score = order, detail = 'trained at step ' .. step .. ', to be used again',
      oldest = known[7], facts = {'uses', uses, 'order', order},
    }
  else
    limiter(-1, -uses)
    used[#used + 1] = id
    over[#over + 1] = {id = id, before = known[1], score = step, detail = 'at step ' .. step, facts = {'uses', uses}}
  end
end

-- A step that nothing is leased for says nothing of others: it may have come late, from a learner that is gone.
local trained = redis.call('ZSCORE', key('leases'), ARGV[1])
local steps = trained and redis.call('ZRANGEBYSCORE', key('leases'), '-inf', ARGV[1]) or {}
local groups = 0
for _, step in ipairs(steps) do
  local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
  for _, id in ipairs(ids) do settle(id, step) end
  groups = groups + #ids
  redis.call('DEL', key('lease:' .. step))
end
if groups > 0 then redis.call('HSET', key('meta'), 'next_step', ARGV[1] + 1) end
call_with('ZREM', key('leases'), steps)
call_with('ZADD', key('used'), used_again)
call_with('ZREM', key('used'), used)
enter_all('ready', again)
enter_all('trained', over)
count('uses', groups)
add('meta', 'consumed', groups)
return groups

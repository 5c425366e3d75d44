-- leased -> trained, for all groups of a step; with uses left: -> ready. ARGV: step (0-based), uses that a group may have,
-- seed. Returns how many.
local step = ARGV[1]
local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
math.randomseed(tonumber(ARGV[3]))
local race
local over, again, used, used_again = {}, {}, {}, {}
for _, id in ipairs(ids) do
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'lengths', 'uses', 'raced', 'weight', 'order', 'oldest')
  local uses, order = tonumber(known[3] or 0) + 1, known[6]
  redis.call('RPUSH', key('steps:' .. id), step)
  add_lengths('trained', cjson.decode(known[2]), 1)
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
    used[#used + 1] = id
    over[#over + 1] = {id = id, before = known[1], score = step, detail = 'at step ' .. step, facts = {'uses', uses}}
  end
end
call_with('ZADD', key('used'), used_again)
call_with('ZREM', key('used'), used)
enter_all('ready', again)
enter_all('trained', over)
redis.call('DEL', key('lease:' .. step))
if #ids > 0 then redis.call('HSET', key('meta'), 'next_step', step + 1) end
redis.call('ZREM', key('leases'), step)
count('uses', #ids)
limiter(0, #ids)
add('meta', 'consumed', #ids)
return #ids

-- leased -> trained, for all groups of a step; with uses left: -> ready. ARGV: step (0-based), uses that a group may have,
-- seed. Returns how many.
local step = ARGV[1]
local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
math.randomseed(tonumber(ARGV[3]))
for _, id in ipairs(ids) do
  local uses = tonumber(redis.call('HINCRBY', key('about:' .. id), 'uses', 1))
  redis.call('RPUSH', key('steps:' .. id), step)
  add_lengths('trained', cjson.decode(about(id, 'lengths')), 1)
  if uses < tonumber(ARGV[2]) then
    if about(id, 'raced') == '1' then
      -- It enters the race anew, as an arrival does (sampling.py).
      local order = tonumber(redis.call('HGET', key('meta'), 'race') or 0)
        - math.log(1 - math.random()) / tonumber(about(id, 'weight'))
      redis.call('HSET', key('about:' .. id), 'order', string.format('%.17g', order))
    end
    redis.call('ZADD', key('used'), step, id)
    back_to_ready(id, 'trained at step ' .. step .. ', to be used again')
  else
    redis.call('ZREM', key('used'), id)
    enter(id, 'trained', step, 'at step ' .. step)
  end
end
redis.call('DEL', key('lease:' .. step))
if #ids > 0 then redis.call('HSET', key('meta'), 'next_step', step + 1) end
redis.call('ZREM', key('leases'), step)
count('uses', #ids)
limiter(0, #ids)
redis.call('HINCRBY', key('meta'), 'consumed', #ids)
return #ids

-- leased -> trained, for all groups of a step. ARGV: step (0-based). Returns how many.
local lease = key('lease:' .. ARGV[1])
local ids = redis.call('ZRANGE', lease, 0, -1)
local moved = 0
for _, id in ipairs(ids) do
  -- A lease that ran out went back to ready; it was trained on all the same.
  if is_held(id, ARGV[1]) or redis.call('ZSCORE', key('ready'), id) then
    redis.call('ZREM', key('leased'), id)
    redis.call('ZREM', key('ready'), id)
    redis.call('ZADD', key('trained'), ARGV[1], id)
    moved = moved + 1
  end
end
redis.call('DEL', lease)
redis.call('HINCRBY', key('meta'), 'consumed', moved)
return moved

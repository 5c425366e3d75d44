-- Trained and durable groups whose bytes are to be moved from Redis into a spill file (spill.py).
-- Returns {id, size in bytes, ...}; other groups are taken off the list.
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', key('to_spill'))) do
  local state, size = state_of(id), redis.call('STRLEN', key('group:' .. id))
  if (state == 'trained' or state == 'durable') and size > 0 then
    found[#found + 1] = id
    found[#found + 1] = size
  else
    redis.call('SREM', key('to_spill'), id)
  end
end
return found

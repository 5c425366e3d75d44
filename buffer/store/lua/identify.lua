-- Fixes what the run is. args: names, values; a name that was fixed before keeps its value. Returns the values.
local fixed = {}
for i, name in ipairs(args.names) do
  redis.call('HSETNX', key('identity'), name, args.values[i])
  fixed[i] = redis.call('HGET', key('identity'), name)
end
return fixed
